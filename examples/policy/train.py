"""A policy with memory, from training to an artefact: PPO and a Transformer-XL, as CleanRL's ppo_trxl.py.

    python train.py FOLDER [--steps STEPS] [--seed SEED]

The task is gymnasium's CartPole-v1 without velocities: the policy sees where the cart and the pole are, and
must remember where they were. It trains, exports the policy to FOLDER/artefact, and plays 100 episodes with
PyTorch and with the artefact.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import runtimes
import xl_export
from xl_export.adapters import from_forward

M, LAYERS, D, HEADS = 16, 2, 32, 4  # steps remembered, and the sizes of the network
ENVIRONMENTS, ROLLOUT = 16, 128  # steps of each environment between two updates
EPOCHS, MINIBATCHES, CLIP, ENTROPY = 4, 8, 0.2, 0.001
DISCOUNT, TRACE, RATE = 0.99, 0.95, 1e-3


class Layer(nn.Module):
    """Attention over the memory and the step itself, and a feed-forward network; norms before both."""

    def __init__(self) -> None:
        super().__init__()
        self.by_age = nn.Parameter(torch.zeros(M, D))  # added to the memory: how long ago a step was
        self.query, self.key_value, self.out = nn.Linear(D, D), nn.Linear(D, 2 * D), nn.Linear(D, D)
        self.norm_attention, self.norm_feed_forward = nn.LayerNorm(D), nn.LayerNorm(D)
        self.feed_forward = nn.Sequential(nn.Linear(D, 2 * D), nn.ReLU(), nn.Linear(2 * D, D))

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
        context = self.norm_attention(torch.cat([memory + self.by_age, x], dim=1))
        query = self.query(context[:, M:]).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        pair = self.key_value(context).chunk(2, dim=-1)
        key, value = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in pair)
        visible = F.pad(mask, (0, x.shape[1]), value=True)[:, None, None]
        answer = F.scaled_dot_product_attention(query, key, value, attn_mask=visible)
        x = x + self.out(answer.transpose(1, 2).flatten(2))
        return x + self.feed_forward(self.norm_feed_forward(x))


class Policy(nn.Module):
    """Reads one observation [B, 1, 2]; its memory is the last M inputs of each layer, [B, M, D] each."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(2, D)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.actor, self.critic = nn.Linear(D, 2), nn.Linear(D, 1)
        for layer in (*self.modules(),):
            if isinstance(layer, nn.Linear):
                nn.init.orthogonal_(layer.weight, 0.01 if layer is self.actor else 1.0)
                nn.init.zeros_(layer.bias)

    def forward(
        self, observation: Tensor, mems: list[Tensor], mask: Tensor
    ) -> tuple[tuple[Tensor, Tensor], list[Tensor]]:
        """(logits of the actions [B, 1, 2], value [B, 1]), and the new memory.

        mask bool [B, M]: where the memory holds a step of this episode.
        """
        x, after = self.encoder(observation / observation.new_tensor([2.4, 0.21])), []
        for layer, memory in zip(self.layers, mems, strict=True):
            after.append(torch.cat([memory, x.detach()], dim=1)[:, -M:])
            x = layer(x, memory, mask)
        return (self.actor(x), self.critic(x)[..., 0]), after

    def start(self, batch: int) -> list[Tensor]:
        return [torch.zeros(batch, M, D) for _ in range(LAYERS)]


def mask_of(age: Tensor) -> Tensor:
    """bool [B, M]: where the memory of an episode that has taken `age` [B] steps holds one of them."""
    return torch.arange(M) >= M - age[:, None]


class Memory:
    """The memory of some episodes that run side by side, as PyTorch plays them."""

    def __init__(self, policy: Policy, batch: int) -> None:
        self.policy, self.mems, self.age = policy, policy.start(batch), torch.zeros(batch, dtype=torch.long)

    @torch.no_grad()
    def step(self, observations: np.ndarray) -> tuple[Tensor, Tensor]:
        """Logits [B, 2] and values [B] for observations [B, 2]."""
        shown = torch.from_numpy(observations)[:, None]
        (logits, value), self.mems = self.policy(shown, self.mems, mask_of(self.age))
        self.age += 1
        return logits[:, 0], value[:, 0]


def make_environment() -> gym.Env:
    """CartPole-v1 that shows the positions of cart and pole, without their velocities."""
    environment = gym.make("CartPole-v1")
    seen = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    return gym.wrappers.TransformObservation(environment, lambda state: state[[0, 2]], seen)


def train(policy: Policy, steps: int, seed: int) -> None:
    """Proximal policy optimisation over `steps` steps of all environments together."""
    environments = [make_environment() for _ in range(ENVIRONMENTS)]
    observations = np.stack([each.reset(seed=seed + n)[0] for n, each in enumerate(environments)])
    playing, returns, finished = Memory(policy, ENVIRONMENTS), np.zeros(ENVIRONMENTS), [0.0]
    optimizer = torch.optim.Adam(policy.parameters(), RATE, eps=1e-5)
    updates, began = max(1, steps // (ENVIRONMENTS * ROLLOUT)), time.monotonic()
    for update in range(updates):
        optimizer.param_groups[0]["lr"] = RATE * (1 - update / updates)
        kept = []  # of each step, in the order of the names below
        for _ in range(ROLLOUT):
            shown, mems, age = observations.copy(), playing.mems, playing.age.clone()
            logits, value = playing.step(shown)
            action = torch.distributions.Categorical(logits=logits).sample()
            rewards, ended = np.zeros(ENVIRONMENTS, np.float32), np.zeros(ENVIRONMENTS, np.float32)
            for n, environment in enumerate(environments):
                observations[n], rewards[n], terminated, truncated, _ = environment.step(int(action[n]))
                returns[n] += rewards[n]
                if terminated or truncated:
                    ended[n] = 1
                    observations[n], _ = environment.reset()
                    playing.age[n] = 0  # the next step begins an episode
                    finished.append(returns[n])
                    returns[n] = 0
            log_prob = logits.log_softmax(-1).gather(1, action[:, None])[:, 0]
            facts = (torch.from_numpy(shown), torch.stack(mems, 1), age, action, log_prob, value)
            kept.append((*facts, torch.from_numpy(rewards * (1 - DISCOUNT)), torch.from_numpy(ended)))
        shown, mems, age, action, log_prob, value, reward, ended = map(torch.stack, zip(*kept, strict=True))

        # Generalised advantage estimation, from the last step backwards.
        ahead = Memory(policy, ENVIRONMENTS)
        ahead.mems, ahead.age = playing.mems, playing.age.clone()
        following, advantage, sum_of = ahead.step(observations)[1], torch.zeros_like(value), 0.0
        for t in reversed(range(ROLLOUT)):
            goes_on = 1 - ended[t]
            surprise = reward[t] + DISCOUNT * following * goes_on - value[t]
            advantage[t] = sum_of = surprise + DISCOUNT * TRACE * goes_on * sum_of
            following = value[t]
        target = advantage + value

        flat = [each.flatten(0, 1) for each in (shown, mems, age, action, log_prob, advantage, target)]
        for _ in range(EPOCHS):
            for part in torch.randperm(ENVIRONMENTS * ROLLOUT).chunk(MINIBATCHES):
                shown, mems, age, action, before, advantage, target = (each[part] for each in flat)
                (logits, value), _ = policy(shown[:, None], list(mems.unbind(1)), mask_of(age))
                options = torch.distributions.Categorical(logits=logits[:, 0])
                ratio = (options.log_prob(action) - before).exp()
                advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
                gain = torch.min(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage).mean()
                error = F.mse_loss(value[:, 0], target) / 2
                loss = 0.5 * error - gain - ENTROPY * options.entropy().mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
                optimizer.step()
        if update % 10 == 9 or update == updates - 1:
            print(
                f"{(update + 1) * ENVIRONMENTS * ROLLOUT:,} steps in {time.monotonic() - began:.0f} s: "
                f"return {np.mean(finished[-50:]):.0f}"
            )


def play(seed: int, begin: Callable[[], Callable[[np.ndarray], np.ndarray]]) -> list[int]:
    """The likeliest actions of one episode.

    begin: returns a step without any memory yet, from an observation [2] to logits [2].
    """
    environment, actions, step = make_environment(), [], begin()
    observation, _ = environment.reset(seed=seed)
    while True:
        actions.append(int(step(observation).argmax()))
        observation, _, terminated, truncated, _ = environment.step(actions[-1])
        if terminated or truncated:
            return actions


def compare(policy: Policy, artefact: Path, episodes: int) -> None:
    """Prints the returns of PyTorch, of the artefact, and of the artefact without memory, for equal seeds."""
    session = runtimes.open_session(artefact, threads=1)
    streams = session.start(1)

    def in_pytorch() -> Callable[[np.ndarray], np.ndarray]:
        memory = Memory(policy, 1)
        return lambda observation: memory.step(observation[None])[0][0].numpy()

    def in_artefact(*, forget: bool = False) -> Callable[[np.ndarray], np.ndarray]:
        streams.positions[0] = 0  # the next step begins an episode

        def step(observation: np.ndarray) -> np.ndarray:
            if forget:
                streams.positions[0] = 0
            outputs, _ = session.step({"observation": observation[None, None]}, streams)
            return outputs["action"][0, 0]

        return step

    sides = {
        "PyTorch": in_pytorch,
        "artefact": in_artefact,
        "artefact without memory": lambda: in_artefact(forget=True),
    }
    actions = {name: [play(seed, begin) for seed in range(episodes)] for name, begin in sides.items()}
    for name, played in actions.items():
        lengths = [len(each) for each in played]
        print(f"return of {name} over {episodes} episodes: {np.mean(lengths):.1f}, lowest {min(lengths)}")
    same = sum(one == other for one, other in zip(actions["PyTorch"], actions["artefact"], strict=True))
    print(f"PyTorch and artefact take the same actions in {same} of {episodes} episodes")


def export(policy: Policy, folder: Path) -> Path:
    """Writes the artefact, after a comparison with PyTorch."""
    module = from_forward(
        policy.eval(),
        memory=[(M, D)] * LAYERS,
        inputs={"observation": xl_export.features(2)},
        outputs=("action", "value"),
        mask_name="mask",
    )
    return xl_export.trace(module, folder, rule=xl_export.MemoryRule(mem_len=M, segment=1), rows=1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Trains a policy with memory and exports it.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    if given.folder.exists():
        parser.error(f"{given.folder} exists; give the name of a new folder.")
    torch.manual_seed(given.seed)
    torch.set_num_threads(1)  # so small a network is no faster with more
    policy = Policy()
    train(policy, given.steps, given.seed)
    artefact = export(policy, given.folder / "artefact")
    torch.save(policy.state_dict(), given.folder / "policy.pt")
    print(runtimes.check(artefact).sentence)
    compare(policy, artefact, 100)

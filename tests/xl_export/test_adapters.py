"""Modules in the style of public projects become artefacts by `from_forward`, and agree with their authors'
own loops.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.nn import functional as F

import xl_export
from runtimes import check
from runtimes.base.errors import ConfigError, UserError
from runtimes.contract.rule import MemoryRule
from runtimes.contract.spec import load_spec
from runtimes.contract.vocabulary import IdsVocab
from tests.parity.authors import Stream, episodes, largest_differences
from tests.parity.operations import Program
from xl_export.adapters import (
    from_forward,
    from_ppo_trxl,
    from_recurrent_memory,
    from_rllib,
    from_rwkv,
    from_torchrl,
    from_x_transformers,
)
from xl_export.tracing.module import ModuleStep
from xl_export.tracing.verify import check_module

pytestmark = pytest.mark.usefixtures("fast_traces")
DIM, LAYERS, M, T, V = 16, 2, 6, 4, 20
OPTIONS: dict[str, Any] = {  # of `from_forward` for `TransformerWrapper`
    "memory": [(M, DIM)] * LAYERS,
    "sizes": xl_export.Sizes(vocab_size=V, layers=LAYERS, d_model=DIM),
}
EPISODE = 30  # the most steps of an episode, all of which the streams of the tests have


class Attention(nn.Module):
    """Causal attention over memory and segment with a learned bias by distance, as x-transformers has it."""

    def __init__(self) -> None:
        super().__init__()
        self.to_q = nn.Linear(DIM, DIM, bias=False)
        self.to_kv = nn.Linear(DIM, 2 * DIM, bias=False)
        self.bias = nn.Embedding(M + T, 1)

    def forward(self, x: Tensor, mem: Tensor | None, mem_mask: Tensor | None) -> Tensor:
        k, v = self.to_kv(x if mem is None else torch.cat((mem, x), dim=1)).chunk(2, dim=-1)
        i, j = x.shape[1], k.shape[1]
        distance = torch.arange(i)[:, None] + (j - i) - torch.arange(j)
        hidden = distance < 0
        if mem_mask is not None:
            hidden = hidden | ~F.pad(mem_mask, (0, i), value=True)[:, None]
        scores = self.to_q(x) @ k.transpose(1, 2) + self.bias(distance.clamp(min=0))[..., 0]
        return scores.masked_fill(hidden, float("-inf")).softmax(dim=-1) @ v


class TransformerWrapper(nn.Module):
    """A language model whose memory is a growing list of hidden states, cut to the last M."""

    def __init__(self) -> None:
        super().__init__()
        self.token_emb = nn.Embedding(V, DIM)
        self.attn = nn.ModuleList(Attention() for _ in range(LAYERS))
        self.to_logits = nn.Linear(DIM, V)

    def forward(
        self, x: Tensor, mems: list[Tensor] | None = None, mem_mask: Tensor | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        x = self.token_emb(x)
        new_mems = []
        for layer, attn in enumerate(self.attn):
            mem = None if mems is None else mems[layer]
            new_mems.append((x if mem is None else torch.cat((mem, x), dim=1))[:, -M:].detach())
            x = x + attn(x, mem, mem_mask)
        return self.to_logits(x), new_mems


class Agent(nn.Module):
    """A recurrent policy: observations in, action logits and value out, one memory [B, M, D] that starts with
    zeros and grows.
    """

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(5, DIM)
        self.actor, self.critic = nn.Linear(DIM, 3), nn.Linear(DIM, 1)

    def forward(self, obs: Tensor, memory: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
        x = F.relu(self.encoder(obs))
        length = x.shape[1]
        distance = torch.arange(length)[:, None] + M - torch.arange(M + length)
        hidden = (distance < 0) | (distance > M)
        context = torch.cat([memory, x], dim=1)
        scores = (x @ context.transpose(1, 2)).masked_fill(hidden, float("-inf"))
        x = x + scores.softmax(dim=-1) @ context
        return (self.actor(x), self.critic(x)[..., 0]), context


class Episodic(nn.Module):
    """The transformer of CleanRL's ppo_trxl and of its origin: one token attends to a window of the episode,
    not to itself.
    """

    def __init__(self, layers: nn.ModuleList) -> None:
        super().__init__()
        self.pos_embedding = nn.Parameter(torch.randn(EPISODE, DIM))
        self.layers = layers
        self.norm = nn.LayerNorm(DIM)

    def forward(self, x: Tensor, memories: Tensor, mask: Tensor, memory_indices: Tensor) -> Any:
        memories = memories + self.pos_embedding[memory_indices].unsqueeze(2)
        kept = []
        for number, layer in enumerate(self.layers):
            kept.append(x)
            query = layer(x)[:, :DIM].unsqueeze(1)
            key, value = layer(memories[:, :, number])[..., DIM:].chunk(2, -1)
            energy = (query @ key.transpose(1, 2)).masked_fill(mask.unsqueeze(1) == 0, -1e20)
            x = self.norm(x.unsqueeze(1) + F.relu(energy.softmax(-1) @ value))
            x = x.squeeze()  # these lines are theirs: a batch of one row loses an axis too many
            if len(x.shape) == 1:
                x = x.unsqueeze(0)
        return x, torch.stack(kept, dim=1)


class CleanRLTransformer(Episodic):
    def __init__(self) -> None:
        super().__init__(nn.ModuleList([nn.Linear(DIM, 3 * DIM)]))
        self.transformer_layers = self.layers


class OriginTransformer(Episodic):
    def __init__(self) -> None:
        super().__init__(nn.ModuleList(nn.Linear(DIM, 3 * DIM) for _ in range(2)))
        self.transformer_blocks = self.layers


class CleanRLAgent(nn.Module):
    """An agent with the parts of CleanRL's."""

    def __init__(self) -> None:
        super().__init__()
        self.obs_shape = (5,)
        self.max_episode_steps = EPISODE
        self.encoder = nn.Linear(5, DIM)
        self.transformer = CleanRLTransformer()
        self.hidden_post_trxl = nn.Sequential(nn.Linear(DIM, DIM), nn.ReLU())
        self.actor_branches = nn.ModuleList(nn.Linear(DIM, count) for count in (3, 2))
        self.critic = nn.Linear(DIM, 1)

    def act(self, x: Tensor, *window: Tensor) -> Any:
        hidden, new = self.transformer(self.encoder(x), *window)
        hidden = self.hidden_post_trxl(hidden)
        return [branch(hidden) for branch in self.actor_branches], self.critic(hidden)[:, 0], new


class OriginAgent(nn.Module):
    """An agent with the parts of episodic-transformer-memory-ppo's `ActorCriticModel`."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_space_shape = (5,)
        self.max_episode_length = EPISODE
        self.memory_layer_size = DIM
        self.lin_hidden = nn.Linear(5, DIM)
        self.transformer = OriginTransformer()
        self.lin_policy, self.lin_value = nn.Linear(DIM, 24), nn.Linear(DIM, 24)
        self.policy_branches = nn.ModuleList(nn.Linear(24, count) for count in (3, 2))
        self.value = nn.Linear(24, 1)

    def forward(self, obs: Tensor, memory: Tensor, memory_mask: Tensor, memory_indices: Tensor) -> Any:
        h = F.relu(self.lin_hidden(obs))
        h, memory = self.transformer(h, memory, memory_mask, memory_indices)
        h_policy = F.relu(self.lin_policy(h))
        value = self.value(F.relu(self.lin_value(h))).reshape(-1)
        return [Categorical(logits=branch(h_policy)) for branch in self.policy_branches], value, memory

    def act(self, x: Tensor, *window: Tensor) -> Any:
        policy, value, new = self(x, *window)
        return [each.logits for each in policy], value, new


@pytest.mark.slow
def test_a_memory_that_moves_by_segment_agrees_over_fifty_steps(
    cpp: Program, javascript: Program, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = TransformerWrapper().eval()
    module = from_forward(model, **OPTIONS, mask_name="mem_mask", moves_every=T)
    rule = MemoryRule(mem_len=M, segment=3)
    artefact = xl_export.trace(module, tmp_path / "a", vocab=IdsVocab(V), rule=rule, without={"padding"})
    assert load_spec(artefact).moves_every == T
    programs = {"C++": cpp, "JavaScript": javascript}
    assert max(largest_differences(artefact, Stream(model, T), programs, tmp_path).values()) < 1e-4
    rule = MemoryRule(mem_len=M, segment=T + 1)
    with pytest.raises(UserError, match=f"moves every {T} tokens; give a rule with segment={T} or less"):
        xl_export.trace(module, tmp_path / "b", vocab=IdsVocab(V), rule=rule)


class Running(nn.Module):
    """Sums of ids, whose mean over a short memory counts too."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(count, 4)
        self.out = nn.Linear(4, count)

    def forward(self, x: Tensor, mems: list[Tensor]) -> Any:
        hidden = self.embedding(x).cumsum(1) + mems[0].mean(1, keepdim=True)
        return self.out(hidden), [torch.cat([mems[0], hidden.tanh()], 1)]


def test_long_segments_restart_and_keep_large_ids() -> None:
    """The memory is shorter than the segment, and float16, its type here, does not hold the ids."""
    torch.manual_seed(0)
    every, count = 12, 2600
    sizes = xl_export.Sizes(vocab_size=count, layers=1, d_model=4)
    module: Any = from_forward(Running(count), memory=[(2, 4)], sizes=sizes, moves_every=every)
    ids = torch.arange(count - every - 1, count)
    memory = module.start(1)
    with torch.no_grad():
        for place, token in [*enumerate(ids), *enumerate(ids[-3:])]:
            halves = [x.half().float() * (place > 0) for x in memory]
            answer, memory = module.step(token.view(1, 1), torch.tensor([[place]]), halves)
        right, _ = module.module(ids[None, -3:], [torch.zeros(1, 2, 4)])
    assert torch.allclose(answer, right[:, -1:], atol=1e-4)


def test_a_memory_may_move_with_every_whole_segment() -> None:
    """Then the inputs of an unfinished segment, which the memory holds too, are never read."""
    torch.manual_seed(0)
    sizes = xl_export.Sizes(vocab_size=8, layers=1, d_model=4)
    module = from_forward(Running(8), memory=[(2, 4)], sizes=sizes, moves_every=4)
    rule = MemoryRule(mem_len=4, segment=4)
    assert check_module(ModuleStep(module.eval()), rule, "own", {"padding"}) == ("padding",)


def test_a_step_that_shifts_its_own_tokens_is_refused(tmp_path: Path) -> None:
    class Shifted(nn.Module):
        moves_every = 4
        inputs = xl_export.features(2)

        def start(self, batch: int) -> list[Tensor]:
            return [torch.zeros(batch, 2)]

        def step(self, x: Tensor, positions: Tensor, memory: list[Tensor]) -> Any:
            after = memory[0] * 0.5 + x.mean(1)
            return x + F.pad(x, (0, 0, 1, 0))[:, :-1] + memory[0][:, None], [after]

    rule = MemoryRule(mem_len=4, segment=1)
    with pytest.raises(UserError, match=r"in segments and token by token.*step\.$"):  # "cuts" would not help
        xl_export.trace(Shifted(), tmp_path / "a", rule=rule, without={"padding", "cuts"})


@pytest.mark.parametrize("kind", [CleanRLAgent, OriginAgent])
def test_an_episodic_memory_agrees_over_fifty_steps(
    kind: type[CleanRLAgent | OriginAgent], cpp: Program, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    agent = kind().eval()
    rule = MemoryRule(mem_len=M - 1, segment=1)
    artefact = xl_export.trace(from_ppo_trxl(agent, M), tmp_path / "a", rule=rule)

    def call(x: Tensor, *window: Tensor) -> Any:
        (first, second), value, new = agent.act(x, *window)
        return {"action_0": first, "action_1": second, "value": value}, new

    stream = episodes(call, M, EPISODE, (len(agent.transformer.layers), DIM))
    assert max(largest_differences(artefact, stream, {"C++": cpp}, tmp_path).values()) < 1e-4


def test_a_policy_for_single_observations_is_fed_no_more(tmp_path: Path) -> None:
    class Recurrent(nn.GRUCell):
        def forward(self, obs: Tensor, state: Tensor) -> Any:  # type: ignore[override]
            hidden = super().forward(obs.squeeze(1), state[:, -1])[:, None]
            return hidden[..., :3], hidden[..., 3], hidden

    inputs = {"obs": xl_export.features(5)}
    module = from_forward(
        Recurrent(5, DIM), memory=(1, DIM), memory_name="state", inputs=inputs, outputs=("action", "value")
    )
    rule = MemoryRule(mem_len=1, segment=1)
    spec = load_spec(xl_export.trace(module, tmp_path / "a", rule=rule))
    assert [fact.shape for fact in spec.signature[1]] == [("batch", "tokens", 3), ("batch", "tokens")]
    assert spec.without == ()


def test_a_policy_with_a_growing_memory_agrees_over_fifty_steps(javascript: Program, tmp_path: Path) -> None:
    torch.manual_seed(0)
    policy = Agent().eval()
    module = from_forward(
        policy,
        memory=(M, DIM),
        memory_name="memory",
        inputs={"obs": xl_export.features(5)},
        outputs=("action", "value"),
    )
    rule = MemoryRule(mem_len=M, segment=T)
    artefact = xl_export.trace(module, tmp_path / "a", rule=rule, without={"padding"})
    assert check(artefact).passed

    def call(x: Tensor, memory: Tensor) -> Any:
        (action, value), grown = policy(x, memory)
        return {"action": action, "value": value}, grown[:, -M:]

    stream = Stream(call, 1, torch.zeros(1, M, DIM))
    assert max(largest_differences(artefact, stream, {"JavaScript": javascript}, tmp_path).values()) < 1e-4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"memory_name": "memories"}, "forward has no argument 'memories'; expected .* x, mems, mem_mask"),
        ({"mask_name": "mask"}, "forward has no argument 'mask'"),
        ({"sizes": None}, "give `inputs`, or `sizes`"),
        ({"memory": []}, "expected shapes of one row"),
        ({"moves_every": 1}, "moves_every is 1; expected a whole number of at least 2"),
    ],
)
def test_arguments_that_do_not_fit_the_forward_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        from_forward(TransformerWrapper(), **(OPTIONS | change))


def made(kind: str, **attributes: Any) -> nn.Module:
    """A module of a package, of which an adapter sees only this class and these attributes."""
    module: nn.Module = type(kind, (nn.Module,), {})()
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


ATTENTION = made("Decoder", dim=8, layers=made("Attention", num_mem_kv=2))
HALF = {"emb.weight": torch.zeros(2, 2, dtype=torch.float16)}
ON = {"always_have_read_memories": True, "causal": True, "use_custom_causal_attn_mask": True}


@pytest.mark.parametrize(
    ("adapter", "model", "words"),
    [
        (
            from_x_transformers,
            made("Wrapper", max_mem_len=8, num_memory_tokens=4),
            r"num_memory_tokens \(4\)",
        ),
        (
            from_x_transformers,
            made("Wrapper", attn_layers=ATTENTION),
            r"num_mem_kv \(2\) in attn_layers.layers",
        ),
        (from_x_transformers, made("Wrapper", attn_layers=made("Encoder")), "Encoder"),
        (from_x_transformers, made("Wrapper", to_logits=None, cls_token=torch.zeros(1)), "cls_token"),
        (
            from_recurrent_memory,
            made("Model", **ON | {"always_have_read_memories": False}),
            "always_have_read",
        ),
        (from_recurrent_memory, made("Model", **ON | {"causal": False}), "without causal"),
        (from_recurrent_memory, made("Model", **ON, gated=True), r"gated \(True\)"),
        (from_rllib, made("GTrXLNet", attention_dim=8, window=0.5), r"window \(0.5\)"),
        (partial(from_torchrl, heads={}), made("CausalTransformer", max_seq_len=4, rotary=True), "rotary"),
        (
            partial(from_ppo_trxl, memory_length=4),
            made("Agent", actor_branches=1, recurrent=nn.GRUCell(2, 2)),
            "recurrent",
        ),
        (from_rwkv, made("RWKV", forward_one=None), "is not RWKV-7; set RWKV_V7_ON=1"),
        (from_rwkv, made("RWKV", generate_zero_state=None, _c=None), "set PYTORCH_JIT=0"),
        (from_rwkv, made("RWKV", generate_zero_state=None, z=HALF), "is float16 on cpu, .*cpu fp32"),
    ],
)
def test_an_option_that_an_adapter_does_not_know_is_refused_by_name(
    adapter: Callable[[Any], nn.Module], model: nn.Module, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        adapter(model)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda y, mem: y, r"Policy.forward returns Tensor; .* `return logits, value, mems`"),
        (lambda y, mem: (y, y, [mem]), "returns 2 outputs; give `outputs` as many names"),
        (lambda y, mem: (y, mem), "returns Tensor as the new memory; expected a list of 1"),
        (lambda y, mem: (y, [mem, mem]), "returns 2 memories as the new memory; expected a list of 1"),
        (lambda y, mem: (y, [mem[:, -1:]]), "returns a memory of 1 time steps, fewer than the 4"),
    ],
)
def test_what_forward_returns_is_explained(answer: Any, message: str, tmp_path: Path) -> None:
    class Policy(nn.Module):
        def forward(self, obs: torch.Tensor, mems: list[torch.Tensor]) -> Any:
            return answer(obs, torch.cat([mems[0], obs], 1))

    module = from_forward(Policy(), memory=[(4, 3)], inputs={"obs": xl_export.features(3)})
    rule = xl_export.MemoryRule(mem_len=4, segment=2)
    with pytest.raises(UserError, match=message):
        xl_export.trace(module, tmp_path / "artefact", rule=rule)


class Smoothed(nn.Module):
    """A policy that adds the last observation to the next one, as `smooth` does."""

    def __init__(self, smooth: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.smooth = smooth

    def forward(self, obs: Tensor, mems: list[Tensor]) -> Any:
        return self.smooth(obs, mems[0]), [torch.cat([mems[0], obs], 1)]


def halved(x: Tensor, mem: Tensor) -> Tensor:
    length = int(x.shape[1])  # LENGTH
    return x + (mem[:, -1:] if length == 1 else mem[:, -1:].expand(-1, length, -1))


def viewed(x: Tensor, mem: Tensor) -> Tensor:
    return x.view(x.shape[0], 5, 3) + mem[:, -1:]  # VIEW


def chosen(x: Tensor, mem: Tensor) -> Tensor:
    if mem.any():  # BRANCH
        return x + mem[:, -1:]
    return x


@pytest.mark.parametrize(
    ("smooth", "mark", "message"),
    [
        (halved, "LENGTH", r"could not trace the step: {} fixes tokens \(size 1 of obs\) to 5; .*rows=1"),
        (
            viewed,
            "VIEW",
            r"RuntimeError \(shape '.*' is invalid .*\) at {} with obs \[.* fixed sizes .rows=1",
        ),
        (chosen, "BRANCH", r"could not trace the step: {} depends on the values .*torch.where"),
    ],
)
def test_the_line_that_cannot_be_traced_is_named(
    smooth: Callable[[Tensor, Tensor], Tensor], mark: str, message: str, tmp_path: Path
) -> None:
    lines = Path(__file__).read_text().splitlines()
    number, line = next((at, line) for at, line in enumerate(lines, 1) if line.endswith(f"# {mark}"))
    code = re.escape(f"`{line.strip()}` ({__file__}:{number}, your code)")
    module = from_forward(Smoothed(smooth), memory=[(M, 3)], inputs={"obs": xl_export.features(3)})
    rule = MemoryRule(mem_len=M, segment=5)
    with pytest.raises(UserError, match=message.format(code)):
        xl_export.trace(module, tmp_path / "a", rule=rule, without={"padding", "cuts"})

"""Packages of other projects agree with their artefacts in Python, C++ and JavaScript: `make test-peers`.

Each row of `PEERS` is a model with random weights, its adapter, and a stream as its authors would run it.
CleanRL's ppo_trxl and episodic-transformer-memory-ppo are in no package: clone them, and put the folders of
`ppo_trxl.py` and of `transformer.py` on PYTHONPATH.
"""

from __future__ import annotations

import copy
import importlib.util
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import xl_export
from runtimes.base.errors import ConfigError
from runtimes.contract.spec import load_spec
from tests.parity.authors import Stream, episodes, largest_differences
from tests.parity.operations import Program
from xl_export.adapters import (
    from_forward,
    from_ppo_trxl,
    from_recurrent_memory,
    from_rllib,
    from_rwkv,
    from_torchrl,
    from_transformers,
    from_x_transformers,
)

# What the packages warn of is their own.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

M = S = 8  # tokens of memory, and of a segment of the package
V = 40
WIDTH = 12  # of numbers
EPISODE = 60  # the most steps of an episode
# What the files of CleanRL and of its origin import for their environments.
ENVIRONMENTS = [
    *("memory_gym", "minigrid", "minigrid.wrappers", "pom_env", "tyro", "torch.utils.tensorboard"),
    *(f"environments.{name}_env" for name in ("cartpole", "memory_gym", "minigrid", "poc_memory")),
]


@dataclass
class Peer:
    """A model of a package: its module for `trace`, and how its authors run a stream."""

    module: nn.Module
    stream: Stream
    segment: int
    without: tuple[Any, ...] = ()
    """The promises that it does not keep."""
    mem_len: int = M
    moves: bool = False
    """Whether a text has the same answers at any position."""


def x_transformers(wrapper: Mapping[str, Any] = MappingProxyType({}), **options: Any) -> Peer:
    """wrapper: options of the wrapper; the others are those of its layers."""
    from x_transformers import Decoder, TransformerWrapper

    layers = Decoder(dim=16, depth=2, heads=2, attn_dim_head=8, **options)
    sizes = {"num_tokens": V, "max_seq_len": S, "max_mem_len": M, "use_abs_pos_emb": False}
    net = TransformerWrapper(**{**sizes, **wrapper}, attn_layers=layers).eval()
    stream = Stream(lambda x, mems: net(x, mems=mems, return_mems=True), S)
    module = from_x_transformers(net)
    shift = net.shift_mem_down
    return Peer(module, stream, 4 if shift else S, ("cuts",) if shift else ())


def continuous(**options: Any) -> Peer:
    from x_transformers import ContinuousTransformerWrapper, Decoder

    layers = Decoder(dim=16, depth=2, heads=2, attn_dim_head=8, rotary_pos_emb=True)
    net = ContinuousTransformerWrapper(
        dim_in=WIDTH,
        dim_out=5,
        max_seq_len=S,
        max_mem_len=M,
        attn_layers=layers,
        use_abs_pos_emb=False,
        **options,
    ).eval()

    def call(x: Tensor, mems: Any) -> Any:
        # With return_mems this wrapper returns a tuple, which it cannot read.
        y, kept = net(x, mems=mems, return_intermediates=True)
        before = [each[:, :0] for each in kept.hiddens] if mems is None else mems
        return y, [torch.cat(pair, 1)[:, -M:] for pair in zip(before, kept.hiddens, strict=True)]

    return Peer(from_x_transformers(net), Stream(call, S), S)


def recurrent_memory(**options: Any) -> Peer:
    from recurrent_memory_transformer_pytorch import RecurrentMemoryTransformer

    model = RecurrentMemoryTransformer(
        num_tokens=V, dim=16, depth=2, heads=2, dim_head=8, num_memory_tokens=3, seq_len=S, **options
    ).eval()

    def call(x: Tensor, memory: Any) -> Any:
        y, *after = model(x, memory[0], xl_memories=memory[1])
        return y, after

    return Peer(from_recurrent_memory(model), Stream(call, S, (None, None)), 4, ("padding",))


def rllib() -> Peer:
    from gymnasium.spaces import Box, Discrete
    from ray.rllib.models.torch.attention_net import GTrXLNet

    space = Box(-1.0, 1.0, (WIDTH,))
    model = GTrXLNet(
        space,
        Discrete(4),
        4,
        {"max_seq_len": M},
        "gtrxl",
        num_transformer_units=2,
        attention_dim=16,
        head_dim=8,
        memory_inference=M,
    ).eval()

    def call(x: Tensor, state: list[Tensor]) -> Any:
        action, new = model({"obs": x[:, 0]}, state, torch.ones(1))
        after = [torch.cat([old, one[:, None]], 1)[:, 1:] for old, one in zip(state, new, strict=True)]
        return {"action": action[:, None], "value": model.value_function()[:, None]}, after

    return Peer(from_rllib(model), Stream(call, 1, [torch.zeros(1, M, 16)] * 2), 1)


def torchrl() -> Peer:
    from torchrl.modules import CausalTransformer

    net = CausalTransformer(WIDTH, 16, 2, num_heads=2, max_seq_len=M + 1).eval()
    heads = {"action": nn.Linear(16, 4), "value": nn.Linear(16, 1)}

    def call(x: Tensor, state: Any) -> Any:
        past, at = state
        cache = net.new_kv_cache(1) if past is None else tuple(each.clone() for each in past)
        y, cache = net(x, torch.tensor([[at]]), kv_cache=cache)
        after = (None, 0) if at == M else (cache, at + 1)  # a longer episode begins anew
        return {name: head(y) for name, head in heads.items()}, after

    return Peer(from_torchrl(net, heads), Stream(call, 1, (None, 0)), 1)


def cleanrl(shape: tuple[int, ...], positions: str) -> Peer:
    with mock.patch.dict(sys.modules, dict.fromkeys(ENVIRONMENTS, mock.MagicMock())):
        from ppo_trxl import Agent

    args = SimpleNamespace(
        trxl_num_layers=2,
        trxl_dim=16,
        trxl_num_heads=2,
        trxl_positional_encoding=positions,
        reconstruction_coef=0.0,
    )
    agent = Agent(args, SimpleNamespace(shape=shape), (3, 2), EPISODE).eval()

    def call(x: Tensor, *window: Tensor) -> Any:
        *_, value, new = agent.get_action_and_value(x, *window)
        actions = {f"action_{number}": branch(agent.x) for number, branch in enumerate(agent.actor_branches)}
        return actions | {"value": value}, new

    return Peer(from_ppo_trxl(agent, M + 1), episodes(call, M + 1, EPISODE, (2, 16)), 1)


def origin(**options: Any) -> Peer:
    with mock.patch.dict(sys.modules, dict.fromkeys(ENVIRONMENTS, mock.MagicMock())):
        from model import ActorCriticModel

    transformer = {"num_blocks": 2, "embed_dim": 16, "num_heads": 2, "layer_norm": "pre", **options}
    config = {"hidden_layer_size": 24, "transformer": transformer}
    model = ActorCriticModel(config, SimpleNamespace(shape=(WIDTH,)), (3, 2), EPISODE).eval()

    def call(x: Tensor, *window: Tensor) -> Any:
        policy, value, new = model(x, *window)
        return {f"action_{n}": each.logits for n, each in enumerate(policy)} | {"value": value}, new

    return Peer(from_ppo_trxl(model, M + 1), episodes(call, M + 1, EPISODE, (2, 16)), 1)


class XLNet(nn.Module):
    """XLNet counts time first in its memory."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, mems: list[Tensor]) -> Any:
        answer = self.model(x, mems=[mem.transpose(0, 1) for mem in mems], use_mems=True)
        return answer.logits, [mem.transpose(0, 1) for mem in answer.mems]


def xlnet() -> Peer:
    from transformers import XLNetConfig, XLNetLMHeadModel

    config = XLNetConfig(
        vocab_size=V, d_model=16, n_layer=2, n_head=2, d_inner=32, mem_len=M, attn_type="uni"
    )
    model = XLNetLMHeadModel(config).eval()
    sizes = xl_export.Sizes(vocab_size=V, layers=2, d_model=16)
    module = from_forward(XLNet(model), memory=[(M, 16)] * 2, sizes=sizes)

    def call(x: Tensor, mems: Any) -> Any:
        answer = model(x, mems=mems, use_mems=True)
        return answer.logits, answer.mems

    return Peer(module, Stream(call, 1, [torch.zeros(M, 1, 16)] * 2), 1)


WINDOW = 112  # tokens, more than a stream of the tests has
SMALL = {"vocab_size": V, "hidden_size": 16, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "intermediate_size": 32}
EXPERTS = {"num_experts_per_tok": 1, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
EXPERTS |= {"num_experts": 2, "num_local_experts": 2}
DELTA = {f"linear_num_{name}_heads": 2 for name in ("key", "value")}
DELTA |= {f"linear_{name}_head_dim": 8 for name in ("key", "value")}
ROPE = {"rope_theta": 1e4, "factor": 2.0}
# Of state spaces in hybrids.
SPACES = {
    f"mamba_{name}": size
    for name, size in {"n_heads": 4, "d_state": 4, "n_groups": 1, "chunk_size": 8}.items()
}


def layers(*types: str) -> dict[str, Any]:
    return {"layer_types": list(types)}


def hugging_face(family: str, window: int | None = None, *, config: str = "", **options: Any) -> Peer:
    """config: the name of its class without `Config`, if it is not the family's."""
    import transformers

    given = getattr(transformers, f"{config or family}Config")(**SMALL | options)
    net = getattr(transformers, f"{family}ForCausalLM")(given).eval()
    for weight in net.parameters():
        if weight.ndim > 1:
            nn.init.normal_(weight, std=0.15)

    def call(x: Tensor, state: Any) -> Any:
        cache, seen = copy.deepcopy(state) or (transformers.DynamicCache(config=given), 0)
        y = net(x, cache=cache, position_ids=torch.tensor([[seen]]), use_cache=True).logits
        return y, (cache, seen + 1)  # it is updated in place

    module: Any = from_transformers(net, window)
    return Peer(module, Stream(call, 1), 3, mem_len=module.mem_len, moves=True)


def rwkv() -> Peer:
    """RWKV-7 with random weights, by the names that the package expects."""
    if os.environ.get("PYTORCH_JIT") != "0":
        pytest.skip("rwkv compiles itself; set PYTORCH_JIT=0, as `make test-peers` does")
    heads, width, layers, low = 2, 8, 2, 4
    D = heads * width
    sizes: dict[str, tuple[int, ...]] = {"emb.weight": (V, D), "head.weight": (V, D)}
    norms = ["ln_out", "blocks.0.ln0"]
    for layer in range(layers):
        att, ffn = (f"blocks.{layer}.{part}." for part in ("att", "ffn"))
        norms += [f"blocks.{layer}.ln1", f"blocks.{layer}.ln2", f"{att}ln_x"]
        vectors = ("x_r", "x_w", "x_k", "x_v", "x_a", "x_g", "w0", "a0", "v0", "k_k", "k_a")
        sizes |= {f"{att}{name}": (1, 1, D) for name in vectors}
        for name in "wavg":
            sizes |= {f"{att}{name}1": (D, low), f"{att}{name}2": (low, D)}
        sizes |= {f"{att}{name}.weight": (D, D) for name in ("receptance", "key", "value", "output")}
        sizes |= {f"{att}r_k": (heads, width), f"{ffn}x_k": (1, 1, D)}
        sizes |= {f"{ffn}key.weight": (4 * D, D), f"{ffn}value.weight": (D, 4 * D)}
    sizes |= {f"{norm}.{part}": (D,) for norm in norms for part in ("weight", "bias")}
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, RWKV_V7_ON="1"):
        torch.save({name: 0.3 * torch.randn(size) for name, size in sizes.items()}, f"{folder}/tiny.pth")
        from rwkv.model import RWKV

        model = RWKV(f"{folder}/tiny", "cpu fp32")
    module = from_rwkv(model)
    return Peer(module, Stream(module.original, 1), S)


PEERS: dict[str, tuple[str, Callable[[], Peer]]] = {
    "T5": ("x_transformers", lambda: x_transformers(rel_pos_bias=True)),
    "rotary": ("x_transformers", lambda: x_transformers(rotary_pos_emb=True)),
    "xpos": ("x_transformers", lambda: x_transformers(rotary_xpos=True)),
    "absolute": ("x_transformers", lambda: x_transformers({"use_abs_pos_emb": True})),
    "ALiBi": ("x_transformers", lambda: x_transformers(alibi_pos_bias=True, alibi_num_heads=1)),
    "shifted": ("x_transformers", lambda: x_transformers({"shift_mem_down": 1}, rel_pos_bias=True)),
    "tied layers": ("x_transformers", lambda: x_transformers(rel_pos_bias=True, weight_tie_layers=True)),
    "options": (
        "x_transformers",
        lambda: x_transformers(
            {"tie_embedding": True, "post_emb_norm": True},
            rotary_pos_emb=True,
            use_rmsnorm=True,
            gate_residual=True,
            ff_glu=True,
            ff_swish=True,
            attn_qk_norm=True,
            attn_kv_heads=1,
            attn_gate_values=True,
        ),
    ),
    "continuous": ("x_transformers", continuous),
    "recurrent": ("recurrent_memory_transformer_pytorch", recurrent_memory),
    "recurrent, without keys": (
        "recurrent_memory_transformer_pytorch",
        lambda: recurrent_memory(use_xl_memories=False),
    ),
    "recurrent, rotary": (
        "recurrent_memory_transformer_pytorch",
        lambda: recurrent_memory(rotary_pos_emb=True),
    ),
    "RLlib": ("ray", rllib),
    "TorchRL": ("torchrl", torchrl),
    "CleanRL": ("ppo_trxl", lambda: cleanrl((WIDTH,), "learned")),
    "CleanRL, images": ("ppo_trxl", lambda: cleanrl((84, 84, 3), "absolute")),
    "its origin": ("transformer", lambda: origin(positional_encoding="relative")),
    "its origin, gated": (
        "transformer",
        lambda: origin(positional_encoding="learned", gtrxl=True, gtrxl_bias=0.0),
    ),
    "XLNet": ("transformers", xlnet),
    "Mamba": ("transformers", lambda: hugging_face("Mamba", state_size=4, time_step_rank=2)),
    "Mamba-2": (
        "transformers",
        lambda: hugging_face("Mamba2", state_size=4, num_heads=4, head_dim=8, n_groups=2, chunk_size=8),
    ),
    "Falcon Mamba": ("transformers", lambda: hugging_face("FalconMamba", state_size=4, time_step_rank=2)),
    "Mistral": ("transformers", lambda: hugging_face("Mistral", sliding_window=M, **HEADS)),
    "Gemma 2": ("transformers", lambda: hugging_face("Gemma2", WINDOW, sliding_window=M, **HEADS)),
    "Gemma 3": (
        "transformers",
        lambda: hugging_face(
            "Gemma3",
            config="Gemma3Text",
            sliding_window=M,
            **HEADS,
            **layers("sliding_attention", "sliding_attention"),
        ),
    ),
    "LFM2": (
        "transformers",
        lambda: hugging_face("Lfm2", WINDOW, **HEADS, **layers("conv", "full_attention")),
    ),
    "Falcon-H1": (
        "transformers",
        lambda: hugging_face("FalconH1", WINDOW, **HEADS, **SPACES, mamba_d_ssm=16, mamba_d_head=4),
    ),
    "Bamba": (
        "transformers",
        lambda: hugging_face("Bamba", WINDOW, **HEADS, **SPACES, mamba_d_head=8, attn_layer_indices=[1]),
    ),
    "Qwen3-Next": (
        "transformers",
        lambda: hugging_face(
            "Qwen3Next", WINDOW, **HEADS, **DELTA, **EXPERTS, **layers("linear_attention", "full_attention")
        ),
    ),
    "Mixtral": (
        "transformers",
        lambda: hugging_face("Mixtral", sliding_window=M, **HEADS, **EXPERTS),
    ),
    "RWKV-7": ("rwkv", rwkv),
}


@pytest.mark.parametrize("name", PEERS)
def test_a_package_agrees_with_its_artefact_over_fifty_steps(
    name: str, cpp: Program, javascript: Program, tmp_path: Path
) -> None:
    package, make = PEERS[name]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed; see the top of this file")
    torch.manual_seed(0)
    peer = make()
    rule = xl_export.MemoryRule(mem_len=peer.mem_len, segment=peer.segment)
    vocab = xl_export.IdsVocab(V) if hasattr(peer.module, "sizes") else None
    artefact = xl_export.trace(
        peer.module, tmp_path / "artefact", rule=rule, vocab=vocab, without=set(peer.without)
    )
    spec = load_spec(artefact)
    assert spec.without == peer.without
    programs = {"C++": cpp, "JavaScript": javascript}
    worst = largest_differences(artefact, peer.stream, programs, tmp_path)
    if peer.moves:
        assert spec.drifts_from is None
        worst |= {f"{language}, moved": moved(program, artefact) for language, program in programs.items()}
    print(f"{name}: " + ", ".join(f"{language} {difference:.1e}" for language, difference in worst.items()))
    assert max(worst.values()) < 1e-4


def moved(program: Program, artefact: Path) -> float:
    """How much the answers to the same text differ at positions 1,000 and 10 million."""
    program.ask("open", model=str(artefact))
    program.ask("start", stream="far", rows=2)
    program.ask("pad", stream="far", positions=[1000, 10**7])
    worst = 0.0
    for token in np.random.default_rng(0).integers(V, size=30).tolist():
        near, far = np.split(np.array(program.ask("step", stream="far", tokens=[[token]] * 2)["logits"]), 2)
        worst = max(worst, float(np.abs(near - far).max()))
    return worst


REFUSED: dict[str, tuple[str, Callable[[], Peer]]] = {
    "num_memory_tokens": ("x_transformers", lambda: x_transformers({"num_memory_tokens": 2})),
    "has_memory_tokens": ("x_transformers", lambda: continuous(num_memory_tokens=2)),
    "cls_token": ("x_transformers", lambda: x_transformers({"use_cls_token": True})),
    "has_multiple_heads": ("x_transformers", lambda: x_transformers({"num_output_heads": 2})),
    "num_mem_kv": ("x_transformers", lambda: x_transformers(attn_num_mem_kv=2)),
    "ShiftTokens": ("x_transformers", lambda: x_transformers(shift_tokens=1)),
    "reinject_input": ("x_transformers", lambda: x_transformers(reinject_input=True)),
    "cross_attend": ("x_transformers", lambda: x_transformers(cross_attend=True)),
    "causal": ("recurrent_memory_transformer_pytorch", lambda: recurrent_memory(causal=False)),
    "use_custom_causal_attn_mask": (
        "recurrent_memory_transformer_pytorch",
        lambda: recurrent_memory(memory_not_causal=False),
    ),
    "full_attention": ("transformers", lambda: hugging_face("Llama", **HEADS)),
    "dynamic": (
        "transformers",
        lambda: hugging_face("Llama", WINDOW, **HEADS, rope_parameters={"rope_type": "dynamic", **ROPE}),
    ),
    "DynamicCache": ("transformers", lambda: hugging_face("xLSTM", num_heads=2)),
    "cache": (
        "transformers",
        lambda: hugging_face("RecurrentGemma", num_hidden_layers=3, **HEADS, lru_width=16),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_option_that_the_adapter_does_not_know_is_refused(name: str) -> None:
    package, make = REFUSED[name]
    pytest.importorskip(package)
    with pytest.raises(ConfigError, match=rf"\b{name}\b"):
        make()

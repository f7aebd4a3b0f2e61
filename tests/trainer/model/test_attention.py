"""Attention: the fast form against the naive one for every kind of term, and dropout of the weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from runtimes.contract.rule import MemoryRule
from tests.nightly import matrix
from trainer.model import blocked
from trainer.model.attention import Terms, relative_attention
from trainer.model.naive import naive_attention

# B, T, M, H, K: odd sizes; no memory, memory shorter and longer than the segment, one token, one head
SIZES = [(1, 1, 0, 1, 1), (3, 5, 0, 1, 3), (2, 7, 3, 3, 5), (3, 3, 7, 2, 1), (1, 1, 5, 3, 3), (2, 5, 5, 1, 7)]
# the terms of Transformer-XL, Shaw, learned positions, spans, persistent vectors, both of these, all, none
KINDS: dict[str, tuple[str, ...]] = {
    "relative": ("position", "u", "v"),
    "shaw": ("position", "bias", "u"),
    "learned": ("position",),
    "span": ("position", "gate"),
    "persistent": ("position", "persistent_key", "persistent_value"),
    "all-attention": ("position", "gate", "persistent_key", "persistent_value"),
    "all": ("position", "bias", "u", "v", "gate", "persistent_key", "persistent_value"),
    "absolute": (),
}
RULES: list[dict[str, Any]] = [
    {},
    {"mask": "full"},
    {"initial_memory": "zeros"},
    {"mask": "full", "initial_memory": "zeros"},
    {"include_self": False},
    {"include_self": False, "initial_memory": "zeros"},
]
TIGHT = {"rtol": 1e-10, "atol": 1e-12}


def inputs(B: int, T: int, M: int, H: int, K: int, kind: str = "relative", N: int = 4) -> dict[str, Tensor]:
    """Random tensors of every input of a kind. A soft mask falls from 1 to 0 with the distance, as spans
    do."""
    J = M + T
    shapes = {
        "query": (B, T, H, K),
        "key": (B, J, H, K),
        "value": (B, J, H, K),
        "position": (J, H, K),
        "bias": (J, H),
        "u": (H, K),
        "v": (H, K),
        "persistent_key": (H, N, K),
        "persistent_value": (H, N, K),
    }
    generator = torch.Generator().manual_seed(T + 10 * M)
    given = {}
    for name, shape in shapes.items():
        drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
        if name in ("query", "key", "value") or name in KINDS[kind]:
            given[name] = drawn.requires_grad_()
    if "gate" in KINDS[kind]:
        slopes = torch.rand(H, generator=generator, dtype=torch.float64)
        given["gate"] = (
            (1 - slopes * (torch.arange(J)[:, None] - 1) / 3).clamp(0, 1).detach().requires_grad_()
        )
    return given


def attend(
    form: Any, given: dict[str, Tensor], visible: Tensor, *, longest: int | None = None, **options: Any
) -> Tensor:
    """Either form of attention on named inputs."""
    names = [name for name in ("position", "bias", "u", "v", "gate") if name in given]
    terms = Terms(**{name: given[name] for name in names}, longest=longest)  # type: ignore[arg-type]
    persistent = (given["persistent_key"], given["persistent_value"]) if "persistent_key" in given else None
    context = (given[name] for name in ("query", "key", "value"))
    answer: Tensor = form(*context, visible=visible, terms=terms, persistent=persistent, **options)
    return answer


def visibility(rule: MemoryRule, positions: list[int], T: int) -> Tensor:
    """[B, T, J] from the rule, for rows whose first token is at the given stream positions."""
    offset = torch.arange(T)[None, :, None]
    query = torch.tensor(positions)[:, None, None] + offset
    key = torch.tensor(positions)[:, None, None] + torch.arange(-rule.mem_len, T)
    return rule.visible(query - key, query, offset)


@pytest.mark.parametrize(("kind", "sizes", "options"), matrix(tuple(KINDS), SIZES, RULES))
def test_fast_attention_equals_naive_in_values_and_all_gradients(
    kind: str, sizes: tuple[int, int, int, int, int], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In pieces of one lane and about two queries, and in the form for devices and compilers."""
    monkeypatch.setattr(blocked, "BLOCK_QUERIES", 2)
    monkeypatch.setattr(blocked, "GROUP_BYTES", 1)
    B, T, M, _, _ = sizes
    visible = visibility(MemoryRule(mem_len=M, segment=T, **options), [0, 2, 3 * M + 1][:B], T)
    given = inputs(*sizes, kind)
    longest = None if options.get("mask") == "full" else M
    in_blocks = attend(relative_attention, given, visible, longest=longest)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    plain = attend(relative_attention, given, visible, longest=longest)
    naive = attend(naive_attention, given, visible)
    upstream = torch.randn(naive.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    gradients = [
        torch.autograd.grad(answer, given.values(), upstream, materialize_grads=True)
        if answer.requires_grad
        else [torch.zeros(())] * len(given)
        for answer in (in_blocks, plain, naive)
    ]
    for form, fast, ours in zip(("in blocks", "plain"), (in_blocks, plain), gradients, strict=False):
        torch.testing.assert_close(fast, naive, **TIGHT)
        for name, mine, true in zip(given, ours, gradients[-1], strict=True):
            message = f"{form}, gradient of {name}: "
            torch.testing.assert_close(mine, true, **TIGHT, msg=lambda text, start=message: start + text)


@pytest.mark.parametrize("kind", ["relative", "all-attention", "all"])
def test_gradients_with_dropout_equal_finite_differences(kind: str) -> None:
    """With dropout every call drops the same weights, because it begins with the same seed."""
    given = inputs(1, 3, 2, 1, 2, kind)
    visible = visibility(MemoryRule(mem_len=2, segment=3), [1], 3)
    if "gate" in given:  # away from the clamps
        given["gate"] = torch.linspace(0.9, 0.2, 5, dtype=torch.float64)[:, None].requires_grad_()

    def answer(*tensors: Tensor) -> Tensor:
        torch.manual_seed(0)
        chosen = dict(zip(given, tensors, strict=True))
        return attend(relative_attention, chosen, visible, dropout=0.4)

    assert torch.autograd.gradcheck(answer, tuple(given.values()), fast_mode=True)


def test_dropout_falls_on_the_weights_and_keeps_their_mean() -> None:
    given = inputs(1, 1, 3, 1, 2)
    given |= {name: given[name].expand(300, -1, -1, -1) for name in ("query", "key", "value")}
    given["value"] = torch.ones_like(given["value"])  # an answer is then the sum of the weights
    visible = visibility(MemoryRule(mem_len=3, segment=1), [9], 1)
    torch.manual_seed(0)
    sums = attend(relative_attention, given, visible, dropout=0.5)[:, 0, 0, 0].tolist()
    assert len({round(value, 9) for value in sums}) == 2**4  # every subset of four weights
    assert sum(sums) / len(sums) == pytest.approx(1.0, abs=0.15)


@pytest.mark.parametrize("kind", ["span", "all-attention", "all"])
def test_window_and_epsilon_agree_in_both_forms(kind: str) -> None:
    """The softmax ends at the window, and the masked weights are divided by their sum plus the epsilon."""
    given = inputs(2, 7, 5, 3, 5, kind)
    visible = visibility(MemoryRule(mem_len=5, segment=7, include_self=False), [0, 9], 7)
    terms = {name: given[name] for name in ("position", "bias", "u", "v", "gate") if name in given}
    persistent = None if kind == "span" else (given["persistent_key"], given["persistent_value"])
    context = (given["query"], given["key"], given["value"])
    answers = []
    for window, epsilon in ((3, 0.5), (3, 0.0), (5, 0.5)):
        chosen = Terms(**terms, window=window, epsilon=epsilon)
        fast, naive = (
            form(*context, visible=visible, terms=chosen, persistent=persistent)
            for form in (relative_attention, naive_attention)
        )
        torch.testing.assert_close(fast, naive, **TIGHT)
        mine, true = (torch.autograd.grad(each.square().sum(), given.values()) for each in (fast, naive))
        torch.testing.assert_close(dict(zip(given, mine, strict=True)), dict(zip(given, true, strict=True)))
        answers.append(fast)
    assert not any(torch.allclose(answers[0], other) for other in answers[1:])


def test_gradients_in_bf16_are_summed_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every key gets a gradient from each of 48 pieces. A sum in bf16 would be rounded 48 times."""
    monkeypatch.setattr(blocked, "BLOCK_QUERIES", 2)
    given = inputs(1, 96, 0, 2, 8, "absolute")
    visible = torch.ones(1, 96, 96, dtype=torch.bool)
    errors = {}
    for dtype in (torch.float64, torch.bfloat16):
        chosen = {name: tensor.detach().to(dtype).requires_grad_() for name, tensor in given.items()}
        attend(relative_attention, chosen, visible).sum().backward()
        errors[dtype] = chosen["value"].grad
    true, rounded = errors[torch.float64], errors[torch.bfloat16]
    assert ((rounded.double() - true).abs() / true.abs()).median() < 2**-9

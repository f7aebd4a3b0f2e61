"""Relative attention: the fast form against the naive one, and its parts against the formulas."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from runtimes.rule import MemoryRule
from trainer.attention import relative_attention, shift, sinusoids
from trainer.naive import naive_attention

# B, T, M, H, K: odd sizes; no memory, memory shorter and longer than the segment, one token, one head
SIZES = [(1, 1, 0, 1, 1), (3, 5, 0, 1, 3), (2, 7, 3, 3, 5), (3, 3, 7, 2, 1), (1, 1, 5, 3, 3), (2, 5, 5, 1, 7)]
NAMES = ("query", "key", "value", "position", "u", "v")
TIGHT = {"rtol": 1e-10, "atol": 1e-12}


def inputs(B: int, T: int, M: int, H: int, K: int) -> dict[str, Tensor]:
    shapes = ((B, T, H, K), (B, M + T, H, K), (B, M + T, H, K), (M + T, H, K), (H, K), (H, K))
    generator = torch.Generator().manual_seed(T + 10 * M)
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
        for name, shape in zip(NAMES, shapes, strict=True)
    }


def visibility(rule: MemoryRule, positions: list[int], T: int) -> Tensor:
    """[B, T, J] from the rule, for rows whose first token is at the given stream positions."""
    offset = torch.arange(T)[None, :, None]
    query = torch.tensor(positions)[:, None, None] + offset
    key = torch.tensor(positions)[:, None, None] + torch.arange(-rule.mem_len, T)
    return rule.visible(query - key, query, offset)


@pytest.mark.parametrize("initial_memory", ["masked", "zeros"])
@pytest.mark.parametrize("mask", ["same-length", "full"])
@pytest.mark.parametrize("sizes", SIZES)
def test_fast_attention_equals_naive_in_values_and_all_gradients(
    sizes: tuple[int, int, int, int, int], mask: str, initial_memory: str
) -> None:
    B, T, M, _, _ = sizes
    rule = MemoryRule(mem_len=M, segment=T, mask=mask, initial_memory=initial_memory)
    visible = visibility(rule, [0, 2, 3 * M + 1][:B], T)
    given = inputs(*sizes)
    fast = relative_attention(**given, visible=visible)
    naive = naive_attention(**given, visible=visible)
    torch.testing.assert_close(fast, naive, **TIGHT)
    upstream = torch.randn(fast.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ours_and_true = (torch.autograd.grad(answer, given.values(), upstream) for answer in (fast, naive))
    for name, ours, true in zip(NAMES, *ours_and_true, strict=True):
        torch.testing.assert_close(ours, true, **TIGHT, msg=lambda text, name=name: f"gradient of {name}: {text}")


def test_every_input_has_a_gradient_where_it_matters() -> None:
    """Guards the comparison above: two forms that both ignore an input would agree."""
    given = inputs(2, 3, 2, 2, 3)
    rule = MemoryRule(mem_len=2, segment=3)
    loss = relative_attention(**given, visible=visibility(rule, [0, 4], 3)).square().sum()
    for name, gradient in zip(NAMES, torch.autograd.grad(loss, given.values()), strict=True):
        assert gradient.abs().max() > 1e-3, name


def test_gradients_equal_finite_differences() -> None:
    given = inputs(1, 3, 2, 1, 2)
    visible = visibility(MemoryRule(mem_len=2, segment=3), [1], 3)

    def answer(*tensors: Tensor) -> Tensor:
        return relative_attention(**dict(zip(NAMES, tensors, strict=True)), visible=visible)

    assert torch.autograd.gradcheck(answer, tuple(given.values()))


def test_a_key_out_of_sight_changes_nothing() -> None:
    given = inputs(1, 3, 4, 2, 3)
    visible = visibility(MemoryRule(mem_len=4, segment=3), [2], 3)  # two of four memory slots are older than the text
    before = relative_attention(**given, visible=visible)
    for name in ("key", "value"):
        given[name] = torch.cat([torch.full_like(given[name][:, :2], 1e3), given[name][:, 2:]], dim=1)
    assert torch.equal(relative_attention(**given, visible=visible), before)


@pytest.mark.parametrize(("T", "M"), [(1, 0), (1, 4), (3, 0), (5, 2), (2, 5), (4, 4)])
def test_shift_moves_each_distance_to_its_key(T: int, M: int) -> None:
    J = M + T
    scores = torch.arange(2 * 3 * T * J, dtype=torch.float64).view(2, 3, T, J)  # column c is distance J - 1 - c
    shifted = shift(scores)
    assert shifted.shape == scores.shape
    for i in range(T):
        for j in range(M + i + 1):  # keys that are not in the future
            distance = M + i - j
            assert torch.equal(shifted[:, :, i, j], scores[:, :, i, J - 1 - distance])


def test_sinusoids_follow_the_formula() -> None:
    D = 6
    table = sinusoids(torch.tensor([0, 1, 7, 1000]), D)
    assert table.dtype == torch.float64
    for row, distance in zip(table.tolist(), (0, 1, 7, 1000), strict=True):
        angles = [distance / 10000 ** (2 * i / D) for i in range(D // 2)]
        expected = [math.sin(angle) for angle in angles] + [math.cos(angle) for angle in angles]
        assert row == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_dropout_falls_on_the_weights_and_keeps_their_mean() -> None:
    given = inputs(1, 1, 3, 1, 2)
    given["value"] = torch.ones_like(given["value"])  # the answer is then the sum of the weights, 1 without dropout
    visible = visibility(MemoryRule(mem_len=3, segment=1), [9], 1)
    torch.manual_seed(0)
    sums = [relative_attention(**given, visible=visible, dropout=0.5)[0, 0, 0, 0].item() for _ in range(2000)]
    assert len({round(value, 9) for value in sums}) == 2**4  # every subset of four weights
    assert sum(sums) / len(sums) == pytest.approx(1.0, abs=0.1)

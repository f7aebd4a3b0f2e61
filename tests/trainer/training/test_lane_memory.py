"""The memory of training holds the pieces in which it came, and reads as one tensor."""

from __future__ import annotations

import random

import pytest
import torch

from trainer.training.lane_memory import LaneMemory


@pytest.mark.parametrize("mem_len", [0, 3, 10])
@pytest.mark.parametrize("B", [1, 2])
def test_pieces_read_as_one_memory(B: int, mem_len: int) -> None:
    """Segments shorter and longer than the memory; the whole and parts of it are read between them."""
    draw, at = random.Random(mem_len), 0
    naive = [torch.zeros(B, mem_len, 1) for _ in range(2)]
    memory = LaneMemory(naive)
    for _ in range(60):
        T = draw.choice([1, 2, 3, 7, 12])
        segment = torch.arange(at, at + T, dtype=torch.float32)[None, :, None].repeat(B, 1, 1)
        at += T
        memory.add([segment, -segment], mem_len)
        naive = [
            torch.cat([held, x], dim=1)[:, T:] for held, x in zip(naive, [segment, -segment], strict=True)
        ]
        lengths = draw.choice([None, [0, 1], [2, 5], [99, 4]])
        for layer, part in enumerate(memory.last(lengths)):
            length = mem_len if lengths is None else min(mem_len, lengths[layer])
            assert torch.equal(part, naive[layer][:, mem_len - length :])
            assert part.is_contiguous()
        if draw.random() < 0.2:
            whole = memory.whole()
            assert all(map(torch.equal, whole, naive))
            assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in whole)


def test_the_memory_is_kept_in_fp32() -> None:
    memory = LaneMemory([torch.zeros(1, 4, 2)])
    memory.add([torch.ones(1, 2, 2, dtype=torch.bfloat16)], 4)
    assert {tensor.dtype for tensor in [*memory.last([2]), *memory.whole()]} == {torch.float32}

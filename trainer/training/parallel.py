"""Several processes that train one model: the rank and the device of this one, and what they exchange.

Everything here is torch.distributed: gloo on the CPU, NCCL on GPUs. A single process is rank 0 of 1.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from runtimes.base.errors import ConfigError, UserError
from runtimes.base.machine import memory_bytes

# How long one process waits for another: longer than any step, and than the writing of a checkpoint.
TIMEOUT = timedelta(minutes=30)
# Seconds for gloo's threads to release the last tensors of DistributedDataParallel. A release during Python's
# exit aborts the process (PyTorch 2.13), which happened in about 2 of 100 runs on a busy machine.
SETTLE_SECONDS = 0.5
KEPT = "the last checkpoint is kept: continue with `xl-export train --resume RUN`, on any number of processes"

CPU = torch.device("cpu")


class LostError(UserError):
    """Another process of the run ended, so this one cannot continue."""


Rows = TypeVar("Rows", Tensor, np.ndarray)
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Ranks:
    """This process (0, 1, …, count - 1) among the processes of a run, and the device that it trains on."""

    rank: int = 0
    count: int = 1
    device: torch.device = CPU

    @property
    def is_first(self) -> bool:
        """Whether this is the process that writes and reports."""
        return self.rank == 0

    def lanes(self, batch: int, parts: int) -> int:
        """Number of lanes of each process; raises ConfigError if `parts` does not divide them."""
        if batch % (self.count * parts):
            accumulated = f" and accumulate {parts}" if parts > 1 else ""
            raise ConfigError(
                f"batch is {batch} with {self.count} processes{accumulated}; expected a multiple of "
                f"{self.count * parts}, because every part of the batch has equally many lanes."
            )
        return batch // self.count

    def share(self, rows: Rows) -> Rows:
        """The contiguous part of all rows that belongs to this process."""
        own = len(rows) // self.count
        return rows[self.rank * own : (self.rank + 1) * own]

    def wrap(self, module: nn.Module) -> nn.Module:
        """The module, or one that averages its gradients over all processes during the backward pass.

        A module that is sharded does so by itself.
        """
        alone = self.count == 1 or isinstance(module, FSDPModule)
        return module if alone else DistributedDataParallel(module)

    def mean(self, values: Tensor) -> Tensor:
        """The mean over all processes."""
        if self.count > 1:
            dist.all_reduce(values)
        return values / self.count

    def gather(self, rows: Tensor) -> Tensor:
        """The rows of all processes, in the order of `share`; the same on every process."""
        if self.count == 1:
            return rows
        mine = rows.to(self.device).contiguous()  # NCCL needs tensors on a GPU
        parts = [torch.empty_like(mine) for _ in range(self.count)]
        dist.all_gather(parts, mine)
        return torch.cat(parts).to(rows.device)

    def gather_on_first(self, rows: Tensor) -> Tensor | None:
        """The rows of all processes, in the order of `share`, on the host of the first; None elsewhere."""
        if self.count == 1:
            return rows
        mine = rows.to(self.device).contiguous()
        parts = [torch.empty_like(mine) for _ in range(self.count)] if self.is_first else None
        dist.gather(mine, parts, dst=0)
        return torch.cat([part.cpu() for part in parts]) if parts is not None else None

    def from_first(self, tensor: Tensor) -> Tensor:
        """The first process's tensor, on the device of every process."""
        tensor = tensor.to(self.device)
        if self.count > 1:
            dist.broadcast(tensor, 0)
        return tensor

    def on_first(self, work: Callable[[], Answer]) -> Answer:
        """What `work` returns on the first process, sent to all; its UserError ends all of them."""
        if self.count == 1:
            return work()
        outcome: list[Any] = [None, None]
        if self.is_first:
            try:
                outcome[0] = work()
            except UserError as error:
                outcome[1] = error
        dist.broadcast_object_list(outcome)
        if outcome[1] is not None:
            self.refuse(outcome[1])
        return outcome[0]  # type: ignore[no-any-return]

    def refuse(self, error: UserError) -> NoReturn:
        """Raises on the first process an error that all have found; the others end with its exit code."""
        if self.is_first:
            raise error
        raise SystemExit(2) from error

    def agree(self, what: str, value: str) -> None:
        """Raises ConfigError if the processes have different values."""
        values: list[Any] = [None] * self.count
        if self.count > 1:
            dist.all_gather_object(values, value)
            if len(set(values)) > 1:
                self.refuse(
                    ConfigError(
                        f"the processes of this run have different {what}; give every machine the same."
                    )
                )

    def memory_bytes(self) -> int:
        """Memory of the device in bytes."""
        if self.device.type == "cuda":
            return torch.cuda.get_device_properties(self.device).total_memory
        if self.device.type == "mps":
            return torch.mps.recommended_max_memory()
        return memory_bytes()


ALONE = Ranks()


@contextmanager
def unexchanged(module: nn.Module) -> Iterator[None]:
    """A block without exchange of gradients; the first backward pass after it exchanges the sum."""
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(False)
        yield
        module.set_requires_gradient_sync(True)
    else:
        with module.no_sync() if isinstance(module, DistributedDataParallel) else nullcontext():
            yield


@contextmanager
def joined(device: str) -> Iterator[Ranks]:
    """This process among those that `torchrun` started, until the block ends.

    device: `cpu`, `cuda` or `mps` (not run). Raises ConfigError for a GPU that is not there, and UserError if
    another process is lost: at once if its connection closes, after torchrun's SIGTERM within a second, or
    after TIMEOUT.
    """
    count = int(os.environ.get("WORLD_SIZE", "1"))
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if device == "mps" and not torch.backends.mps.is_available():
        raise ConfigError(
            "device is mps and PyTorch sees no such GPU; give --device cpu, or train on an Apple computer."
        )
    if device == "cuda":
        found = torch.cuda.device_count()
        if not found:
            raise ConfigError(
                "device is cuda and PyTorch sees no GPU; give --device cpu, or install a CUDA build of "
                "PyTorch and the driver of this machine's GPU."
            )
        if found <= local:
            raise ConfigError(
                f"this is process {local + 1} of this machine, and GPUs that PyTorch sees: {found}; start "
                "one process for each."
            )
        torch.cuda.set_device(local)
    place = torch.device(device, local) if device == "cuda" else torch.device(device)
    if count == 1:
        yield Ranks(device=place)
        return
    before = signal.signal(signal.SIGTERM, _terminated)
    try:
        dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=TIMEOUT)
        yield Ranks(dist.get_rank(), count, place)
        dist.barrier()  # the first process may still be writing; one that left earlier would look lost
        dist.destroy_process_group()
        time.sleep(SETTLE_SECONDS)
    except BaseException as error:
        before = signal.SIG_IGN  # this process is ending already, with a message of its own
        if isinstance(error, RuntimeError) and _is_of_the_connection(error):
            raise LostError(f"another process of this run was lost or does not answer; {KEPT}.") from error
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


def _terminated(*_: object) -> None:
    raise LostError(
        f"this process was terminated (SIGTERM), as torchrun does if another one of the run was lost; {KEPT}."
    )


def _is_of_the_connection(error: RuntimeError) -> bool:
    return isinstance(error, dist.DistError) or any(
        word in str(error) for word in ("gloo", "NCCL", "Connection", "c10d")
    )

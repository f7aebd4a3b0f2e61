"""Sharded training (FSDP2): each process keeps a part of every weight, gradient and optimiser's state.

The weights of a block are put together while it computes. A sharded tensor is a DTensor, and the functions
here take any tensor: one that is not sharded is its own whole. A function that is called collective must be
called by all processes at the same time. Tested with gloo on the CPU; not run on GPUs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from trainer.model.model import LanguageModel

ROOT = "_sharded_by"  # attribute of a model: the module that holds the weights outside its blocks


def shard(objective: nn.Module, model: LanguageModel, device: torch.device) -> None:
    """Shards the weights of a model, and moves them to the device, block by block. Collective.

    objective: the module whose `forward` is the training loss. It keeps those weights that are needed outside
    of blocks.
    """
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    # The loss reads the spans of all layers, so they belong to the whole and not to their blocks.
    objective.spans = nn.ModuleList(model.spans())
    shares = {span.share for span in model.spans()}
    for block in model.blocks:
        fully_shard(block, mesh=mesh, ignored_params=shares)
    fully_shard(objective, mesh=mesh)
    object.__setattr__(model, ROOT, objective)  # not as a submodule: that would be a circle


@contextmanager
def gathered(module: nn.Module) -> Iterator[None]:
    """A block in which the weights of a module are whole. Collective.

    Of a model these are the weights outside of its blocks, which are gathered one at a time.
    """
    holder = getattr(module, ROOT, module)
    if not isinstance(holder, FSDPModule):
        yield
        return
    with torch.inference_mode(False):  # training needs the buffers that are made here
        holder.unshard()
    try:
        yield
    finally:
        holder.reshard()


def whole(tensor: Tensor) -> Tensor:
    """The whole of a tensor; one that is not sharded is returned as it is. Collective."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that this process keeps, which shares its storage."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def assign(tensor: Tensor, value: Tensor) -> None:
    """Copies a whole value into a tensor, of which this process may keep a part."""
    if isinstance(tensor, DTensor):
        value = value.to(tensor.device)
        # Every process has the value, so nothing is sent.
        value = distribute_tensor(value, tensor.device_mesh, tensor.placements, src_data_rank=None).to_local()
    local(tensor).copy_(value)


def clip_whole(parameters: Iterable[nn.Parameter], largest: float) -> Tensor:
    """Scales the whole gradient down to this norm; returns the norm before. Collective."""
    parameters = [parameter for parameter in parameters if parameter.grad is not None]
    norm = whole(
        nn.utils.get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
    )
    nn.utils.clip_grads_with_norm_(parameters, largest, norm)
    return norm


def norms(gradients: list[Tensor]) -> Tensor:
    """The norm of each gradient. Collective."""
    own = torch.stack([local(gradient).norm() for gradient in gradients])
    if any(isinstance(gradient, DTensor) for gradient in gradients):
        squares = own.square()
        dist.all_reduce(squares)
        return squares.sqrt()
    return own

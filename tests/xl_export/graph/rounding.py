"""Models in PyTorch with their weights rounded as a precision preset rounds the graph's: what such an
artefact is to compute.
"""

from __future__ import annotations

import copy

import numpy as np
import torch

from runtimes.contract.precision import PRESETS, Precision
from runtimes.contract.spec import Spec
from runtimes.contract.tensors import head_groups
from trainer.model.model import LanguageModel
from xl_export.graph.quantise import BLOCK, MIN_VALUES


def rounded(model: LanguageModel, precision: Precision, spec: Spec) -> LanguageModel:
    """A copy of `model` whose parameters stand where the constants of its graph do.

    Matrices are rounded in blocks along the dimension that is summed over. Of what is left, those that are
    long enough are rounded to float16, but for the projection of positions, which the graph holds as a table.
    """
    model = copy.deepcopy(model)
    names = [name for name, _ in model.vocabulary.projection.named_parameters()]
    for i in names:  # read both ways, and rounded differently for each: untied here
        if i not in model.vocabulary.output_projection:
            model.vocabulary.output_projection[i] = torch.nn.Parameter(
                model.vocabulary.projection[i].detach().clone()
            )
    preset = PRESETS[precision]
    for name, parameter in model.named_parameters():
        array = parameter.detach().numpy()
        if (
            preset.rounds_activations
            and (axis := _summed_over(name)) is not None
            and array.shape[axis] >= BLOCK
        ):
            matrix = np.moveaxis(array, axis, 0)
            order = _order(name, spec) if name.endswith(".out.weight") else np.arange(len(matrix))
            turned = np.empty_like(matrix)
            turned[order] = in_blocks(matrix[order], preset.bits)
            array = np.moveaxis(turned, 0, axis)
        elif (
            precision == "int8-stored"
            and (axis := _summed_over(name)) is not None
            and array.shape[axis] >= BLOCK
        ):
            array = in_columns(array, axis)
        elif precision != "fp32" and array.size >= MIN_VALUES and "positions.project" not in name:
            scale = np.float32(
                spec.model.head_dim**-0.5 if name.endswith(".query.weight") else 1
            )  # folded into the graph's
            array = (array * scale).astype(np.float16).astype(np.float32) / scale
        parameter.data = torch.from_numpy(np.ascontiguousarray(array))
    return model


def in_blocks(matrix: np.ndarray, bits: int) -> np.ndarray:
    """W [K, N] rounded block by block along K to 2^bits values between its least and its greatest, zero among
    them.
    """
    rounded = np.empty_like(matrix)
    for at in range(0, len(matrix), BLOCK):
        block = matrix[at : at + BLOCK]
        low, high = np.minimum(block.min(axis=0), 0), np.maximum(block.max(axis=0), 0)
        scale = (high - low) / (2**bits - 1)
        zero = np.round(-low / scale)
        rounded[at : at + BLOCK] = (np.clip(np.round(block / scale) + zero, 0, 2**bits - 1) - zero) * scale
    return rounded


def in_columns(matrix: np.ndarray, axis: int = 0) -> np.ndarray:
    """A matrix whose columns, or rows with axis 1, are rounded to 255 values around zero."""
    step = np.abs(matrix).max(axis=axis, keepdims=True) / np.float32(127)
    rounded: np.ndarray = np.round(matrix / step) * step
    return rounded


def _summed_over(name: str) -> int | None:
    """The dimension of a parameter that activations are summed over; None for what the graph does not
    quantise.
    """
    if name.startswith("vocabulary."):
        kinds = {"table": 1, "output_table": 1, "cluster_table": 1, "projection": 1, "output_projection": 0}
        return kinds.get(name.split(".")[1])
    matrices = (
        "query.weight",
        "key.weight",
        "value.weight",
        "out.weight",
        "expand.weight",
        "contract.weight",
    )
    return 1 if name.startswith("blocks.") and name.endswith(matrices) else None


def _order(name: str, spec: Spec) -> np.ndarray:
    """The columns of a layer's output projection as the graph has them: heads by how far they look."""
    groups = head_groups(spec.model, spec.rule, spec.form)[int(name.split(".")[1])]
    order = [head for group in groups for head in group.heads]
    order += [head for head in range(spec.model.heads) if head not in order]
    return np.arange(spec.model.heads * spec.model.head_dim).reshape(spec.model.heads, -1)[order].ravel()

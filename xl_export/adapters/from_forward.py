"""Modules with the usual `forward(x, mems) -> (y, new_mems)` as modules that `xl_export.trace` exports."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from runtimes.base.errors import ArtefactError, ConfigError
from runtimes.base.ranges import Range
from xl_export.tracing.module import Input, Sizes, ids


def from_forward(
    module: nn.Module,
    *,
    memory: Sequence[tuple[int, ...]] | tuple[int, ...],
    inputs: Mapping[str, Input] | Input | None = None,
    sizes: Sizes | None = None,
    outputs: Sequence[str] = (),
    memory_name: str = "mems",
    mask_name: str | None = None,
    moves_every: int | None = None,
) -> nn.Module:
    """A module for `trace` around one whose forward reads a list of memories and returns the new ones.

    - memory: of each tensor of the list, the shape of one row, such as `[(M, D)] * layers`; one shape if
      forward reads and returns one tensor. The first axis of a row is time, newest last. A memory that
      forward returns longer, because it grows, is cut to its last M.
    - inputs, or sizes for a language model: as in the modules that `trace` expects. The keys of a mapping are
      names of arguments of forward; a single input is its first argument.
    - outputs: names, if forward returns several outputs before the memory, or a tuple of them; a mapping has
      names.
    - memory_name: the argument of forward for the memory.
    - mask_name: the argument of forward for a mask bool [B, M] that is true where the memory, whose tensors
      have one length M, holds a token of the stream. Give it if the module starts without memory
      (`mems=None`). Without it a stream starts with a memory of zeros, which is attended to.
    - moves_every: the memory moves when so many tokens are complete, and not with every step. The artefact
      also remembers the inputs of the unfinished segment, and computes the whole segment again in every step:
      forward is called with `moves_every` tokens, whatever a step feeds. It must be causal. At least 2.

    Such a module knows nothing of positions, so it usually needs `trace(…, without={"padding"})`, unless its
    rule has `segment=1`. Raises ConfigError for arguments that forward does not have.
    """
    names = inspect.signature(module.forward).parameters
    given = [
        name for name in (memory_name, mask_name, *(inputs if isinstance(inputs, Mapping) else ())) if name
    ]
    takes_any = any(each.kind == inspect.Parameter.VAR_KEYWORD for each in names.values())
    if missing := [name for name in given if name not in names and not takes_any]:
        raise ConfigError(
            f"{type(module).__name__}.forward has no argument {missing[0]!r}; expected the names of its own "
            f"arguments, {', '.join(names)}."
        )
    if (inputs is None) == (sizes is None):
        raise ConfigError("give `inputs`, or `sizes` for a language model; expected one of them.")
    if moves_every is not None:
        Range(2, whole=True).check("moves_every", moves_every, ConfigError)
    one = all(isinstance(size, int) for size in memory)
    shapes: list[Any] = [tuple(memory)] if one else [tuple(shape) for shape in memory]  # type: ignore[arg-type]
    if not all(shape and all(isinstance(size, int) and size > 0 for size in shape) for shape in shapes):
        raise ConfigError(f"memory is {memory!r:.60}; expected shapes of one row, such as [(M, D)] * layers.")
    # Checks of `trace` name the class of a module: here, the one that the caller wrote.
    wrapper: type[_FromForward] = type(f"from_forward({type(module).__name__})", (_FromForward,), {})
    return wrapper(module, shapes, one, inputs, sizes, tuple(outputs), memory_name, mask_name, moves_every)


class _FromForward(nn.Module):
    def __init__(
        self,
        module: nn.Module,
        shapes: Sequence[tuple[int, ...]],
        one: bool,
        inputs: Mapping[str, Input] | Input | None,
        sizes: Sizes | None,
        outputs: tuple[str, ...],
        memory_name: str,
        mask_name: str | None,
        moves_every: int | None,
    ) -> None:
        super().__init__()
        self.module = module
        given = inputs if sizes is None else ids(sizes.vocab_size)
        self._named: dict[str, Any] = dict(given) if isinstance(given, Mapping) else {"": given}
        if sizes is None:
            self.inputs = inputs
        else:
            self.sizes = sizes
        self._shapes = shapes
        self._one = one  # whether forward reads one tensor and not a list
        self._outputs = outputs
        self._memory_name = memory_name
        self._mask_name = mask_name
        self.moves_every = moves_every

    def start(self, batch: int) -> list[Tensor]:
        shapes = list(self._shapes)
        if self.moves_every is not None:
            shapes += [(self.moves_every, *_held_sizes(each)) for each in self._named.values() if each.timed]
        return [torch.zeros(batch, *shape) for shape in shapes]

    def step(self, inputs: Any, positions: Tensor, memory: Sequence[Tensor]) -> tuple[Any, list[Tensor]]:
        if self.moves_every is None:
            return self._forward(inputs, positions, memory)
        return self._step_in_segment(self.moves_every, inputs, positions, memory)

    def _step_in_segment(
        self, S: int, inputs: Any, positions: Tensor, memory: Sequence[Tensor]
    ) -> tuple[Any, list[Tensor]]:
        """The step of a memory that moves after S tokens; it also holds the inputs [B, S, …] since then."""
        B, T = positions.shape
        row = torch.arange(B)[:, None]
        first = positions[:, :1].clamp(min=0) % S  # the place in the segment of this step's first token
        token = torch.arange(2 * S) - first  # [B, 2 S]: the token of this step at each place of two segments
        complete = first[:, 0] + T >= S
        given = dict(inputs) if isinstance(inputs, Mapping) else {"": inputs}
        timed = [name for name, each in self._named.items() if each.timed]
        held = dict(zip(timed, memory[len(self._shapes) :], strict=True))
        halves: list[dict[str, Tensor]] = [dict(given), dict(given)]
        for name, past in held.items():
            x = given[name]
            is_new = ((token >= 0) & (token < T)).reshape(B, 2 * S, *[1] * (x.ndim - 2))
            if self._named[name].ids is not None:
                past = _joined(past)
            both = torch.where(is_new, x[row, token.clamp(0, T - 1)], torch.cat([past, past], 1).to(x.dtype))
            halves[0][name] = both[:, :S]
            halves[1][name] = both[:, S:]
            kept = _where(complete, both[:, S:], both[:, :S])
            held[name] = kept if self._named[name].ids is None else _halves(kept)
        bare = not isinstance(inputs, Mapping)
        begin = positions[:, :1].clamp(min=0) - first + torch.arange(S)
        before = memory[: len(self._shapes)]
        y, after = self._forward(halves[0][""] if bare else halves[0], begin, before)
        mems = [_where(complete, new, old) for new, old in zip(after, before, strict=True)]
        ys = [y if isinstance(y, Mapping) else {"": y}]
        if not (isinstance(T, int) and T == 1):  # some rows may pass the end of the segment
            y, _ = self._forward(halves[1][""] if bare else halves[1], begin + S, mems)
            ys.append(y if isinstance(y, Mapping) else {"": y})
        outputs = {}
        for name in ys[0]:
            outputs[name] = torch.cat([each[name] for each in ys], 1)[row, first + torch.arange(T)]
        return outputs.get("", outputs), [*mems, *held.values()]

    def _forward(self, inputs: Any, positions: Tensor, memory: Sequence[Tensor]) -> tuple[Any, list[Tensor]]:
        extra: dict[str, Any] = {self._memory_name: memory[0] if self._one else list(memory)}
        if self._mask_name:
            M = self._shapes[0][0]
            age = M - torch.arange(M)  # of each memory: tokens before the first one of this step
            extra[self._mask_name] = age <= positions[:, :1].clamp(min=0)
        result = (
            self.module(**inputs, **extra) if isinstance(inputs, Mapping) else self.module(inputs, **extra)
        )
        forward = f"{type(self.module).__name__}.forward"
        if not isinstance(result, tuple) or len(result) < 2:
            raise ArtefactError(
                f"{forward} returns {type(result).__name__}; expected outputs and then the new memory, as in "
                "`return logits, value, mems`."
            )
        *outputs, new = result
        y = outputs[0] if len(outputs) == 1 else outputs
        if isinstance(y, tuple | list):
            if len(self._outputs) != len(y):
                raise ArtefactError(f"{forward} returns {len(y)} outputs; give `outputs` as many names.")
            y = dict(zip(self._outputs, y, strict=True))
        news = [new] if self._one else new
        if not isinstance(news, tuple | list) or len(news) != len(self._shapes):
            many = f"{len(news)} memories" if isinstance(news, tuple | list) else type(news).__name__
            raise ArtefactError(
                f"{forward} returns {many} as the new memory; expected a list of {len(self._shapes)}, one "
                "for each shape of `memory`."
            )
        for x, shape in zip(news, self._shapes, strict=True):
            if not torch.compiler.is_exporting() and x.shape[1] < shape[0]:
                raise ArtefactError(
                    f"{forward} returns a memory of {x.shape[1]} time steps, fewer than the {shape[0]} of "
                    "`memory`; return the old memory with the new steps after it, as in "
                    "`torch.cat([mem, new], 1)`."
                )
        return y, [x[:, x.shape[1] - shape[0] :] for x, shape in zip(news, self._shapes, strict=True)]


HALF = 1024  # float16 holds whole numbers up to 2,048, and so ids up to two million as two numbers


def _held_sizes(each: Input) -> tuple[int, ...]:
    """The sizes of a token of an input in the memory."""
    return each.sizes if each.ids is None else (*each.sizes, 2)


def _halves(ids: Tensor) -> Tensor:
    """Ids as two numbers [..., 2] that every memory precision holds exactly."""
    return torch.stack([ids // HALF, ids % HALF], dim=-1).float()


def _joined(halves: Tensor) -> Tensor:
    return halves[..., 0] * HALF + halves[..., 1]


def _where(row: Tensor, yes: Tensor, no: Tensor) -> Tensor:
    """torch.where by row [B]."""
    return torch.where(row.reshape(-1, *[1] * (yes.ndim - 1)), yes, no)

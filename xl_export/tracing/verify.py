"""What a module must do so that its artefact is right: checked in PyTorch, before its step is traced.

The graph is compared with the module afterwards, and both could be wrong in the same way. So these checks
compare the module with itself: its memory with whole texts, its restarts with new streams, its rows with each
other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from runtimes.base.errors import ArtefactError, DivergedError
from runtimes.contract.rule import MemoryRule
from runtimes.contract.tensors import AnyForm
from xl_export.tracing.module import Output, first_memory

TOLERANCE = 1e-4  # nats; of two ways to compute the same in float32
PADDING = 3  # tokens


def check_module(module: Any, rule: MemoryRule, form: AnyForm) -> None:
    """Raises ArtefactError with the first promise of `StepModule` that a module breaks."""
    with torch.inference_mode():
        has_memory = any(tensor.numel() for tensor in first_memory(module))
        checks: list[Callable[[_Streams], None]] = [_shapes, _finite, _repeats, _rows_are_independent]
        checks += [_future_is_hidden, *([_memory_counts, _restarts] if has_memory else [])]
        if rule.mask == "same-length":
            checks += [_cuts_agree, *([_padding] if has_memory else [])]
        if form == "ring":
            checks.append(_uneven_rows)
        streams = _Streams(module, rule, form)
        for check in checks:
            check(streams)


class _Streams:
    """Feeds texts to a module; `tokens` int64 [2, N] are two random texts, longer than two segments."""

    def __init__(self, module: Any, rule: MemoryRule, form: AnyForm) -> None:
        self.module, self.rule, self.form, self.output = module, rule, form, Output(module)
        self.name, self.vocab_size = type(module).__name__, module.sizes.vocab_size
        length = min(rule.mem_len, 64) + 2 * rule.segment + 1
        draw = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(self.vocab_size, (2, length), generator=draw)

    def feed(
        self, tokens: Tensor, lengths: Sequence[int], memory: Sequence[Tensor] | None = None, first: int = 0
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """log p [B, N, V] after each token of segments of these lengths, and the memory after the last.

        memory: that of new streams when it is None. first: the stream position of the first token.
        """
        after = first_memory(self.module, len(tokens)) if memory is None else tuple(memory)
        pieces, at = [], 0
        for length in lengths:
            positions = first + at + torch.arange(length).expand(len(tokens), -1)
            hidden, now = self.module.step(
                tokens[:, at : at + length], positions, tuple(x.clone() for x in after)
            )
            logits = self.output.logits(hidden.flatten(0, 1)).reshape(*hidden.shape[:2], -1)
            pieces.append(logits.log_softmax(dim=-1))
            after, at = tuple(now), at + length
        return torch.cat(pieces, dim=1), after

    @property
    def segments(self) -> list[int]:
        """The lengths of whole segments that cover the text, and of what is left."""
        N, T = self.tokens.shape[1], self.rule.segment
        return [T] * (N // T) + ([N % T] if N % T else [])

    def refuse_difference(self, mine: Tensor, theirs: Tensor, *, what: str, mend: str) -> None:
        worst = float((mine - theirs).abs().max())
        if not worst <= TOLERANCE:
            raise ArtefactError(f"{self.name} gives other answers {what}, by {worst:.3g} nats; {mend}.")


def _shapes(streams: _Streams) -> None:
    T, V = streams.rule.segment, streams.vocab_size
    before = first_memory(streams.module, 2)
    positions = torch.arange(T).expand(2, -1)
    result = streams.module.step(streams.tokens[:, :T], positions, before)
    if not isinstance(result, tuple) or len(result) != 2:
        raise ArtefactError(
            f"{streams.name}.step gives {type(result).__name__}; expected a pair: logits and memory."
        )
    hidden, after = result
    logits = streams.output.logits(hidden.flatten(0, 1))
    if hidden.shape[:2] != (2, T) or logits.shape != (2 * T, V):
        raise ArtefactError(
            f"{streams.name} gives logits {list(logits.shape)} of {list(hidden.shape)}; expected [batch, "
            f"segment, {V}], which is the vocab_size of its sizes."
        )
    shapes = [[(list(x.shape), x.dtype) for x in memory] for memory in (before, after)]
    if shapes[0] != shapes[1]:
        raise ArtefactError(
            f"{streams.name}.step gives a memory of {_listed(after)}, and {streams.name}.start one of "
            f"{_listed(before)}; "
            "expected the same shapes and types: let a step drop what is older than the memory."
        )


def _finite(streams: _Streams) -> None:
    if not bool(streams.feed(streams.tokens, streams.segments)[0].isfinite().all()):
        raise DivergedError(
            f"{streams.name} gives log-probabilities that are not finite; trace a module from before the "
            "loss diverged."
        )


def _repeats(streams: _Streams) -> None:
    first, second = (streams.feed(streams.tokens, streams.segments)[0] for _ in range(2))
    streams.refuse_difference(
        first, second, what="to the same text twice", mend="switch off what draws at random"
    )


def _rows_are_independent(streams: _Streams) -> None:
    both, _ = streams.feed(streams.tokens, streams.segments)
    alone, _ = streams.feed(streams.tokens[1:], streams.segments)
    streams.refuse_difference(
        both[1:], alone, what="to a text beside another one", mend="let no row of a batch depend on another"
    )


def _future_is_hidden(streams: _Streams) -> None:
    T = streams.rule.segment
    if T == 1:
        return
    tokens = streams.tokens[:, :T].clone()
    one, _ = streams.feed(tokens, [T])
    tokens[:, -1] = (tokens[:, -1] + 1) % streams.vocab_size
    other, _ = streams.feed(tokens, [T])
    streams.refuse_difference(
        one[:, :-1],
        other[:, :-1],
        what="before a token that changes",
        mend="mask the tokens that are to come",
    )


def _memory_counts(streams: _Streams) -> None:
    """What was fed before must make a difference, in the tensors and in the answers."""
    T = streams.rule.segment
    texts = streams.tokens[:, :T].clone(), (streams.tokens[:, :T] + 1) % streams.vocab_size
    memories = [streams.feed(text, [T])[1] for text in texts]
    for number, pair in enumerate(zip(*memories, strict=True)):
        if pair[0].numel() and bool(pair[0].eq(pair[1]).all()):
            raise ArtefactError(
                f"memory tensor {number} of {streams.name} is the same after every text; return the memory "
                "after the segment, not the one before it."
            )
    last = streams.tokens[:, T : T + 1]
    answers = [streams.feed(last, [1], memory, first=T)[0] for memory in memories]
    if bool(answers[0].eq(answers[1]).all()):
        raise ArtefactError(
            f"the answers of {streams.name} do not depend on its memory; read the memory in `step`, or start "
            "none."
        )


def _restarts(streams: _Streams) -> None:
    T = streams.rule.segment
    _, memory = streams.feed(streams.tokens, streams.segments)
    text = streams.tokens.flip(1)[:, :T]
    again, _ = streams.feed(text, [T], memory)
    fresh, _ = streams.feed(text, [T])
    streams.refuse_difference(
        again,
        fresh,
        what="to a text that starts at position 0 with the memory of another one",
        mend="hide the memory from before position 0, by the positions that `step` is given",
    )


def _padding(streams: _Streams) -> None:
    tokens = streams.tokens[:, :-PADDING]
    _, memory = streams.feed(streams.tokens, streams.segments)
    padded = torch.cat([streams.tokens[:, :PADDING], tokens], dim=1)
    answers, _ = streams.feed(padded, streams.segments, memory, first=-PADDING)
    alone, _ = streams.feed(tokens, [1] * tokens.shape[1])
    streams.refuse_difference(
        answers[:, PADDING:],
        alone,
        what="after padding at negative positions",
        mend="hide tokens at negative positions from those after them",
    )


def _cuts_agree(streams: _Streams) -> None:
    """Under same-length, a text in segments, token by token and as a whole has the same answers."""
    segments, _ = streams.feed(streams.tokens, streams.segments)
    ones, _ = streams.feed(streams.tokens, [1] * streams.tokens.shape[1])
    mend = (
        "show every token the M tokens before it and no others, in the segment too, or give a rule with "
        'mask="full"'
    )
    streams.refuse_difference(segments, ones, what="in segments and token by token", mend=mend)
    if streams.form == "ring":  # has no room for more than a segment
        return
    try:
        whole, _ = streams.feed(streams.tokens, [streams.tokens.shape[1]])
    except (RuntimeError, IndexError):  # a module may have tables for one segment alone
        return
    streams.refuse_difference(segments, whole, what="in segments and as one whole text", mend=mend)


def _uneven_rows(streams: _Streams) -> None:
    """On a ring, the rows of a step may have unequal lengths: padding at their ends leaves no trace."""
    T = streams.rule.segment
    if T == 1:
        return
    fed, rest = streams.tokens[:, : T - 1], streams.tokens[:, T - 1 : 2 * T - 1]
    padded = torch.cat([fed, fed[:, :1]], dim=1)
    _, memory = streams.feed(padded, [T])
    answers, _ = streams.feed(rest, [T], memory, first=T - 1)
    _, memory = streams.feed(fed, [T - 1])
    expected, _ = streams.feed(rest, [T], memory, first=T - 1)
    streams.refuse_difference(
        answers,
        expected,
        what="after a step that was padded at its end",
        mend="hide what a ring holds beyond the M tokens before a token, by xl_export.ring_distances",
    )


def _listed(memory: Sequence[Tensor]) -> str:
    return (
        ", ".join(f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}" for x in list(memory)[:3])
        or "no tensors"
    )

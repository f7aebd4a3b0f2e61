"""What a module must do so that its artefact is right: checked in PyTorch, before its step is traced.

The graph is compared with the module afterwards, and both could be wrong in the same way. So these checks
compare the module with itself: its memory with other cuts of a text, its restarts with new streams, its rows
with each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from runtimes.base.errors import ArtefactError, DivergedError
from runtimes.contract.rule import MemoryRule
from runtimes.contract.tensors import AnyForm
from xl_export.tracing.module import Output, first_memory, in_a_sentence

TOLERANCE = 1e-4  # nats; of two ways to compute the same in float32
PADDING = 3  # tokens
ROWS = 3  # texts
CHANGED = 16  # tokens of a segment that are changed, one at a time


def check_module(module: Any, rule: MemoryRule, form: AnyForm) -> None:
    """Raises ArtefactError with the first promise of `StepModule` that a module breaks."""
    with torch.no_grad():
        has_memory = any(tensor.numel() for tensor in first_memory(module))
        checks: list[Callable[[_Streams], None]] = [_shapes, _finite, _log_probs, _repeats, _future_is_hidden]
        checks += [_memory_counts] if has_memory and rule.mem_len else []
        checks += [_restarts, _padding] if has_memory else []
        checks += [_rows_are_independent, *([_cuts_agree] if rule.mask == "same-length" else [])]
        if form == "ring" and rule.segment > 1:
            checks.append(_uneven_rows)
        streams = _Streams(module, rule, form)
        for check in checks:
            check(streams)


class _Streams:
    """Feeds random texts to a module.

    before int64 [ROWS, P] are whole segments that fill the memory and pass the end of a ring. `full` is the
    memory after them. tokens int64 [ROWS, 2 T + 1] follow, from position P on.
    """

    def __init__(self, module: Any, rule: MemoryRule, form: AnyForm) -> None:
        self.module, self.rule, self.form, self.output = module, rule, form, Output(module)
        self.name, self.vocab_size = type(module).__name__, module.sizes.vocab_size
        draw, T = torch.Generator().manual_seed(0), rule.segment
        count = math.ceil((rule.mem_len + 2 * T) / T)
        text = torch.randint(self.vocab_size, (ROWS, count * T + 2 * T + 1), generator=draw)
        self.before, self.tokens = text[:, : count * T], text[:, count * T :]
        self._full: tuple[Tensor, ...] | None = None

    @property
    def full(self) -> tuple[Tensor, ...]:
        if self._full is None:
            self._full = self.feed(self.before, self.cut(self.before.shape[1]))[1]
        return self._full

    @property
    def follows(self) -> int:
        """The position P after the text that fills the memory."""
        return self.before.shape[1]

    def feed(
        self,
        tokens: Tensor,
        lengths: Sequence[int],
        memory: Sequence[Tensor] | None = None,
        first: int | Sequence[int] = 0,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """log p [B, N, V] after each token of segments of these lengths, and the memory after the last.

        memory: that of new streams when it is None. first: the stream position of the first token, of all
        rows or of each.
        """
        after = first_memory(self.module, len(tokens)) if memory is None else tuple(memory)
        start = torch.as_tensor(first).expand(len(tokens))[:, None]
        pieces, at = [], 0
        for length in lengths:
            hidden, after = self.step(
                tokens[:, at : at + length],
                start + at + torch.arange(length),
                tuple(x.clone() for x in after),
            )
            with in_a_sentence(self.module, "logits", hidden=hidden):
                pieces.append(self.output.logits(hidden).log_softmax(dim=-1))
            at += length
        return torch.cat(pieces, dim=1), after

    def step(
        self, tokens: Tensor, positions: Tensor, memory: Sequence[Tensor]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        with in_a_sentence(self.module, "step", tokens=tokens, positions=positions):
            result = self.module.step(tokens, positions, memory)
        if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[0], Tensor):
            raise ArtefactError(
                f"{self.name}.step gives {type(result).__name__}; expected a pair: logits and memory."
            )
        return result[0], tuple(result[1])

    def cut(self, count: int) -> list[int]:
        """The lengths of whole segments that cover `count` tokens, and of what is left."""
        T = self.rule.segment
        return [T] * (count // T) + ([count % T] if count % T else [])

    def refuse_difference(self, mine: Tensor, theirs: Tensor, *, what: str, mend: str) -> None:
        worst = float((mine - theirs).abs().max()) if mine.numel() else 0.0
        if not worst <= TOLERANCE:
            raise ArtefactError(f"{self.name} gives other answers {what}, by {worst:.3g} nats; {mend}.")


def _shapes(streams: _Streams) -> None:
    T, V = streams.rule.segment, streams.vocab_size
    before = first_memory(streams.module, ROWS)
    hidden, after = streams.step(streams.tokens[:, :T], torch.arange(T).expand(ROWS, -1), before)
    with in_a_sentence(streams.module, "logits", hidden=hidden):
        logits = streams.output.logits(hidden)
    if hidden.shape[:2] != (ROWS, T) or logits.shape != (ROWS, T, V):
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
    text = streams.tokens
    answers = [
        streams.feed(text, streams.cut(text.shape[1]))[0],
        streams.feed(text, streams.cut(text.shape[1]), streams.full, streams.follows)[0],
    ]
    if not all(bool(answer.isfinite().all()) for answer in answers):
        raise DivergedError(
            f"{streams.name} gives log-probabilities that are not finite; trace a module from before the "
            "loss diverged."
        )


def _log_probs(streams: _Streams) -> None:
    """`log_prob`, where a module has it, says the same as its logits."""
    if getattr(streams.module, "log_prob", None) is None:
        return
    T = streams.rule.segment
    text, targets = streams.tokens[:, :T], streams.tokens[:, T : 2 * T].flatten()
    positions = torch.arange(T).expand(ROWS, -1)
    hidden = streams.step(text, positions, first_memory(streams.module, ROWS))[0].flatten(0, 1)
    with in_a_sentence(streams.module, "log_prob", hidden=hidden, targets=targets):
        mine = streams.output.log_prob(hidden, targets)
    if mine.shape != targets.shape:
        raise ArtefactError(
            f"{streams.name}.log_prob gives {list(mine.shape)}; expected one number for each of "
            f"{len(targets)} targets."
        )
    theirs = streams.output.logits(hidden).log_softmax(dim=-1).gather(-1, targets[:, None])[:, 0]
    streams.refuse_difference(
        mine, theirs, what="by log_prob and by logits", mend="let both be of the same distribution"
    )


def _repeats(streams: _Streams) -> None:
    lengths = streams.cut(streams.tokens.shape[1])
    first, second = (streams.feed(streams.tokens, lengths)[0] for _ in range(2))
    streams.refuse_difference(
        first, second, what="to the same text twice", mend="switch off what draws at random"
    )


def _rows_are_independent(streams: _Streams) -> None:
    """One row continues a text, one begins a text, and one is padded before a text."""
    lengths = streams.cut(streams.tokens.shape[1])
    first = [streams.follows, 0, -min(PADDING, streams.tokens.shape[1] - 1)]
    together, _ = streams.feed(streams.tokens, lengths, streams.full, first)
    for row in range(ROWS):
        one = slice(row, row + 1)
        alone, _ = streams.feed(streams.tokens[one], lengths, [x[one] for x in streams.full], first[row])
        text = slice(max(0, -first[row]), None)
        streams.refuse_difference(
            together[one, text],
            alone[:, text],
            what=f"at position {first[row]} beside texts at other positions",
            mend="let no row of a batch depend on another, and give each row its own positions",
        )


def _future_is_hidden(streams: _Streams) -> None:
    T, text = streams.rule.segment, streams.tokens[:1]
    if T == 1:
        return
    full = [x[:1] for x in streams.full]
    one, _ = streams.feed(text[:, :T], [T], full, streams.follows)
    for place in torch.linspace(1, T - 1, min(CHANGED, T - 1)).long().tolist():
        other = text[:, :T].clone()
        other[:, place] = (other[:, place] + 1) % streams.vocab_size
        answers, _ = streams.feed(other, [T], full, streams.follows)
        streams.refuse_difference(
            one[:, :place],
            answers[:, :place],
            what="before a token that changes",
            mend="mask the tokens that are to come",
        )


def _memory_counts(streams: _Streams) -> None:
    """What was fed before must make a difference, in the tensors and in the answers."""
    T = streams.rule.segment
    texts = streams.tokens[:, :T], (streams.tokens[:, :T] + 1) % streams.vocab_size
    before = first_memory(streams.module, ROWS)
    memories = [streams.feed(text, [T])[1] for text in texts]
    for number, (old, *new) in enumerate(zip(before, *memories, strict=True)):
        # A tensor that counts tokens is the same after every text, but not the one that was given.
        if old.numel() and all(bool(x.eq(old).all()) for x in new):
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
    text = streams.tokens.flip(1)[:, :T]
    again, _ = streams.feed(text, [T], streams.full)
    fresh, _ = streams.feed(text, [T])
    streams.refuse_difference(
        again,
        fresh,
        what="to a text that starts at position 0 with the memory of another one",
        mend="hide the memory from before position 0, by the positions that `step` is given",
    )


def _padding(streams: _Streams) -> None:
    """Padding cuts the first segment of a text; both sides are cut in the same places."""
    T = streams.rule.segment
    count = min(PADDING, T - 1) or PADDING  # a segment of one token is padding or text
    text = streams.tokens[:, : 2 * T - (count if T > 1 else 0)]
    padded = torch.cat([streams.tokens[:, :count], text], dim=1)
    answers, _ = streams.feed(padded, streams.cut(padded.shape[1]), streams.full, first=-count)
    alone, _ = streams.feed(text, [T - count, T] if T > 1 else [1] * text.shape[1])
    streams.refuse_difference(
        answers[:, count:],
        alone,
        what="after padding at negative positions",
        mend="hide tokens at negative positions from those after them",
    )


def _cuts_agree(streams: _Streams) -> None:
    """Under same-length, a text in segments and token by token has the same answers, from 0 on and later."""
    N = streams.tokens.shape[1]
    for memory, first in ((None, 0), (streams.full, streams.follows)):
        segments, _ = streams.feed(streams.tokens, streams.cut(N), memory, first)
        ones, _ = streams.feed(streams.tokens, [1] * N, memory, first)
        streams.refuse_difference(
            segments,
            ones,
            what="in segments and token by token",
            mend="show every token the M tokens before it and no others, in the segment too, or give a rule "
            'with mask="full"',
        )


def _uneven_rows(streams: _Streams) -> None:
    """On a ring, the rows of a step may have unequal lengths: padding at their ends leaves no trace."""
    T, P = streams.rule.segment, streams.follows
    one, rest = streams.tokens[:, :1], streams.tokens[:, T:]
    padded = streams.tokens[:, :T]  # its first token is text, and the others are padding
    lengths = [1] * rest.shape[1]
    _, memory = streams.feed(padded, [T], streams.full, first=P)
    answers, _ = streams.feed(rest, lengths, memory, first=P + 1)
    _, memory = streams.feed(one, [1], streams.full, first=P)
    expected, _ = streams.feed(rest, lengths, memory, first=P + 1)
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

"""What a module must do so that its artefact is right: checked in PyTorch, before its step is traced.

The graph is compared with the module afterwards, and both could be wrong in the same way. So these checks
compare the module with itself: its memory with other cuts of a text, its restarts with new streams, its rows
with each other. How far it looks back is measured and compared with its rule.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
OTHERS = 3  # texts that show which numbers of the memory a segment writes


def check_module(module: Any, rule: MemoryRule, form: AnyForm) -> None:
    """Raises ArtefactError with the first promise of `StepModule` that a module breaks."""
    with torch.no_grad():
        has_memory = any(tensor.numel() for tensor in first_memory(module))
        checks: list[Callable[[_Streams], None]] = [
            _shapes,
            _numbers,
            _log_probs,
            _repeats,
            _future_is_hidden,
        ]
        checks += [_memory_counts] if has_memory and rule.mem_len else []
        checks += [_restarts, _padding] if has_memory else []
        checks += [_rows_are_independent, *([_cuts_agree] if rule.mask == "same-length" else [])]
        if form == "ring" and rule.segment > 1:
            checks.append(_uneven_rows)
        checks += [_looks_back, *([_cuts_matter] if rule.mask == "full" and rule.segment > 1 else [])]
        streams = _Streams(module, rule, form)
        for check in checks:
            check(streams)


class _Streams:
    """Feeds random texts to a module.

    before int64 [ROWS, P] are whole segments that fill the memory and pass the end of a ring. `full` is the
    memory after them. tokens int64 [ROWS, 2 T + 1] follow, from position P on.
    """

    def __init__(self, module: Any, rule: MemoryRule, form: AnyForm) -> None:
        self.module = module
        self.rule = rule
        self.form = form
        self.output = Output(module)
        self.name = type(module).__name__
        self.vocab_size = module.sizes.vocab_size
        T = rule.segment
        count = math.ceil((rule.mem_len + 2 * T) / T)
        text = self.random_text(ROWS, count * T + 2 * T + 1)
        self.before = text[:, : count * T]
        self.tokens = text[:, count * T :]
        self._full: tuple[Tensor, ...] | None = None

    def random_text(self, rows: int, count: int) -> Tensor:
        draw = torch.Generator().manual_seed(0)
        return torch.randint(self.vocab_size, (rows, count), generator=draw)

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
        pieces = []
        at = 0
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
        worst = _largest_difference(mine, theirs)
        if not worst <= TOLERANCE:
            raise ArtefactError(f"{self.name} gives other answers {what}, by {worst:.3g} nats; {mend}.")


def _largest_difference(mine: Tensor, theirs: Tensor) -> float:
    """In nats; NaN where a number is missing. Impossible tokens are -inf on both sides, and do not differ."""
    return float((mine - theirs).abs().masked_fill(mine == theirs, 0).max()) if mine.numel() else 0.0


def _shapes(streams: _Streams) -> None:
    T = streams.rule.segment
    V = streams.vocab_size
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


def _numbers(streams: _Streams) -> None:
    text = streams.tokens
    answers = [
        streams.feed(text, streams.cut(text.shape[1]))[0],
        streams.feed(text, streams.cut(text.shape[1]), streams.full, streams.follows)[0],
    ]
    if any(bool(answer.isnan().any()) for answer in answers):
        raise DivergedError(
            f"{streams.name} gives log-probabilities that are not numbers; trace a module from before the "
            "loss diverged."
        )


def _log_probs(streams: _Streams) -> None:
    """`log_prob`, where a module has it, says the same as its logits."""
    if getattr(streams.module, "log_prob", None) is None:
        return
    T = streams.rule.segment
    text = streams.tokens[:, :T]
    targets = streams.tokens[:, T : 2 * T].flatten()
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
    possible = theirs.isfinite()  # what log_prob says of the padding of a vocabulary does not matter
    streams.refuse_difference(
        mine[possible],
        theirs[possible],
        what="by log_prob and by logits",
        mend="let both be of the same distribution",
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
    T = streams.rule.segment
    text = streams.tokens[:1]
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


def _cuts_matter(streams: _Streams) -> None:
    """Under full, the later tokens of a segment see more than M tokens, and so the cuts matter."""
    N = streams.tokens.shape[1]
    rule = streams.rule
    answers = [
        streams.feed(streams.tokens, lengths, streams.full, streams.follows)[0]
        for lengths in (streams.cut(N), [1] * N)
    ]
    if _largest_difference(*answers) <= TOLERANCE:
        raise ArtefactError(
            f"every token of {streams.name} looks back {rule.mem_len} tokens, however a text is cut; with "
            f'mask="full" the last one of a segment looks back {rule.longest_distance}; give '
            'mask="same-length".'
        )


def _looks_back(streams: _Streams) -> None:
    """The memory holds the M tokens of the rule, and no token reads one that is further away."""
    M = streams.rule.mem_len
    name = streams.name
    if _trace_of(streams, M + 1).read:
        found = _largest(lambda distance: _trace_of(streams, distance).read, M + 1, 4 * streams.rule.slots)
        raise ArtefactError(
            f"{name} looks back {found} tokens and the rule says mem_len={M}; give mem_len={found}, or "
            f"hide what is further away than {M}."
        )
    if not M:
        return
    there = _trace_of(streams, M)
    if not there.held:
        found = _largest(lambda distance: _trace_of(streams, distance).held, 0, M - 1)
        if not _is_recurrent(streams, found):
            raise ArtefactError(
                f"the memory of {name} holds {found} tokens and the rule says mem_len={M}; give "
                f"mem_len={found}, or memory tensors for {M} tokens."
            )
    elif not there.read:
        found = _largest(lambda distance: _trace_of(streams, distance).read, 0, M - 1)
        warnings.warn(
            f"{name} looks back {found} tokens and the rule says mem_len={M}, which is right only if "
            "weights decay to zero, as those of learned spans do; otherwise give "
            f"mem_len={found}, or show all {M}.",
            stacklevel=4,
        )


@dataclass(frozen=True)
class _Trace:
    """Whether the memory still holds a token, and whether the next token reads it there."""

    held: bool
    read: bool


def _trace_of(streams: _Streams, distance: int) -> _Trace:
    """What is left of a token, seen by the one `distance` tokens after it.

    Two texts differ only in this token. Layers pass it on: the tokens after it have read it, so what they
    write into the memory differs too, and a text reaches further back than any layer looks. So whatever a
    later segment writes is set equal in both memories. These are the numbers that change with its tokens.
    """
    others = torch.arange(1 + OTHERS)[:, None]
    text = (streams.random_text(1, distance) + others) % streams.vocab_size
    pair = _two_texts(streams)
    at = 0
    for length in streams.cut(distance - 1):
        after = [
            streams.feed(
                text[:, at : at + length],
                [length],
                [x.expand(len(text), *x.shape[1:]) for x in memory],
                streams.follows + 1 + at,
            )[1]
            for memory in pair
        ]
        written = [
            (one != one[:1]).any(dim=0) | (other != other[:1]).any(dim=0)
            for one, other in zip(*after, strict=True)
        ]
        one = [x[:1] for x in after[0]]
        pair = one, [torch.where(*x) for x in zip(written, one, [x[:1] for x in after[1]], strict=True)]
        at += length
    answers = [streams.feed(text[:1, at:], [1], memory, streams.follows + 1 + at)[0] for memory in pair]
    return _Trace(held=_differ(*pair), read=_differ(answers[:1], answers[1:]))


def _is_recurrent(streams: _Streams, held: int) -> bool:
    """Whether a token still matters where layers that look back `held` tokens can no longer pass it on.

    So each token writes anew what it has read, and the memory has no length.
    """
    segment = max(1, min(held, streams.rule.segment))
    layers = max(streams.module.sizes.layers, len(streams.full))
    text = streams.random_text(1, layers * (held + segment - 1) + 1)
    lengths = [segment] * (text.shape[1] // segment) + [1] * (text.shape[1] % segment)
    one, other = (streams.feed(text, lengths, x, streams.follows + 1) for x in _two_texts(streams))
    return _differ([one[0][:, -1:], *one[1]], [other[0][:, -1:], *other[1]])


def _two_texts(streams: _Streams) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """The memories [1, …] after two texts of which only the last token differs."""
    token = streams.tokens[:1, :1]
    full = [x[:1] for x in streams.full]
    one, other = (
        streams.feed(last, [1], full, streams.follows)[1]
        for last in (token, (token + 1) % streams.vocab_size)
    )
    return one, other


def _differ(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    """Whether any bit differs: both come from computations of the same shape, so rounding does not."""
    return not all(torch.equal(x, y) for x, y in zip(one, other, strict=True))


def _largest(holds: Callable[[int], bool], low: int, high: int) -> int:
    """The largest number from low to high for which something holds, by bisection; it holds for low."""
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low


def _uneven_rows(streams: _Streams) -> None:
    """On a ring, the rows of a step may have unequal lengths: padding at their ends leaves no trace."""
    T = streams.rule.segment
    P = streams.follows
    one = streams.tokens[:, :1]
    rest = streams.tokens[:, T:]
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

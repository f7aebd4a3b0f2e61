"""What a module must do so that its artefact is right: checked in PyTorch, before its step is traced.

The graph is compared with the module afterwards, and both could be wrong in the same way. So these checks
compare the module with itself: its memory with other cuts of a text, its restarts with new streams, its rows
with each other. How far it looks back is measured and compared with its rule.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from runtimes.base.errors import ArtefactError, DivergedError, first_line
from runtimes.contract.memory import FAR
from runtimes.contract.promises import Promise
from runtimes.contract.rule import MemoryRule
from runtimes.contract.spec import MAX_ROUNDING, ROUNDINGS
from runtimes.contract.tensors import FORM_FACTS, AnyForm
from xl_export.tracing.module import LOGITS, ModuleStep, drawn_input, in_a_sentence
from xl_export.tracing.progress import stage
from xl_export.tracing.state import TOLERANCE

ROUNDED = 2  # times that the weights are rounded at random
PADDING = 3  # tokens
ROWS = 3  # texts, unless the module computes a fixed number of rows
MANY_ROWS = 9  # texts, of which each is compared with itself in a step of one row
CHANGED = 16  # tokens of a segment that are changed, one at a time
OTHERS = 3  # texts that show which numbers of the memory a segment writes
# A multiple of the usual N of `positions % N`: answers that repeat are the same at a multiple of N.
PERIODS = 2**12 * 3**2 * 5**3 * 7 * 11


def check_module(
    step: ModuleStep, rule: MemoryRule, form: AnyForm, without: Collection[Promise] = ()
) -> tuple[Promise, ...]:
    """The promises among `without` that a module does not keep.

    Raises ArtefactError for anything else that is wrong with it, and one for all other promises that it does
    not keep. If the module does not hide its old memory from a row that starts again, the step does so from
    now on (`ModuleStep.restart_rows`), except in a ring.
    """
    unkept: list[Promise] = []
    broken: list[str] = []  # a sentence for each promise that is not kept and not in `without`

    def keeps(promise: Promise, check: Callable[[_Streams], None], streams: _Streams) -> bool:
        begins(promise)
        try:
            check(streams)
        except ArtefactError as error:
            unkept.append(promise)
            if promise not in without:
                broken.append(str(error).rstrip("."))
        return promise not in unkept

    with stage("comparing the module with itself") as begins, torch.no_grad():
        has_memory = any(tensor.numel() for tensor in step.start(1))
        streams = _Streams(step, rule, form)
        for check in (_shapes, _numbers, _repeats):
            check(streams)
        step.rounding, step.mean_rounding = _rounding(streams)
        for check in (_positions_have_no_end, _log_probs):
            check(streams)
        if has_memory:
            _restarts(streams)
        if step.rows != 1 and not keeps("rows", _rows_are_independent, streams):
            streams = _Streams(step, rule, form, rows=1)
        if step.language_model:
            _future_is_hidden(streams)
        if has_memory and rule.mem_len:
            _memory_counts(streams)
        if has_memory or rule.segment > 1:
            keeps("padding", _padding, streams)
        if step.moves_every and rule.segment == 1:  # no step could feed a whole segment instead
            _cuts_agree(streams)
        elif rule.cuts_change_nothing:
            keeps("cuts", _cuts_agree, streams)
        if FORM_FACTS[form].circular and rule.segment > 1:
            keeps("unequal", _uneven_rows, streams)
        if broken:
            names = ", ".join(f'"{promise}"' for promise in unkept)
            these = "this promise" if len(unkept) == 1 else "these promises"
            raise ArtefactError(f"{'; '.join(broken)}; or trace it without {these}: without={{{names}}}.")
        # A memory that moves a segment at a time has no reach by distance.
        if "cuts" not in unkept and "rows" not in unkept and step.moves_every is None:
            begins("how far it looks back")
            _looks_back(streams)
        if rule.window_grows and rule.segment > 1:
            _cuts_matter(streams)
    return tuple(unkept)


@dataclass(frozen=True)
class Drift:
    """From which position on a module has other answers to the same text, and a sentence about it."""

    position: int
    sentence: str


def drift_of(step: ModuleStep, rule: MemoryRule, form: AnyForm, *, period: int = 1) -> Drift | None:
    """How far from position 0 a module's answers to the same text change; None if they do not.

    They change with rotary keys in a memory, if angles are computed in float32 from absolute positions. No
    graph can fix this: it is compared with the module, which is as wrong there. period: a number of
    positions after which the answers repeat, if it is known.
    """
    streams = _Streams(step, rule, form, rows=1)
    text = streams.before + streams.tokens
    unit = math.lcm(rule.segment, step.moves_every or 1, period)
    wide = math.lcm(unit, rule.slots, PERIODS)
    wide = wide if wide <= FAR // 4 else unit

    def moved(by: int) -> Answers:
        # The text begins past the memory's length, because what is from before position 0 is hidden.
        return streams.feed(text, streams.cut(len(text)), first=streams.follows + by)[0]

    def multiple(number: int, of: int = unit) -> int:
        return max(1, number // of) * of

    with stage("comparing the module with itself") as begins, torch.no_grad():
        begins("far positions")
        near = moved(0)
        # One position shows what all narrower types lose: float32 rounds it to a multiple of 512, int32
        # wraps, and it is no power of two, which `positions % 2**24` would take for 0. A stream of 10,000
        # tokens a second reaches it in ten days.
        far = multiple(FAR - 1, wide)
        apart = moved(far)
        worst = streams.difference(apart, near)
        if worst <= streams.tolerance:
            return None
        agrees = _largest(
            lambda power: streams.difference(moved(multiple(1 << power)), near) <= streams.tolerance, -1, 32
        )
        if agrees < 0 and streams.difference(moved(multiple(FAR // 2, wide)), apart) <= streams.tolerance:
            return None  # it counts, and stops at a number: `positions.clamp(max=N - 1)`
    position = multiple(1 << (agrees + 1))
    unit_of = " nats" if step.language_model else ""
    return Drift(
        position,
        f"{step.name} gives other answers to the same text from about position {position:,} on, by "
        f"{worst:.3g}{unit_of} at position {far:,}, as rotary keys do whose angles are in float32; compute "
        "angles from distances inside the step, or in float64, unless the module should know its position.",
    )


Answers = dict[str, Tensor]  # [B, n, K] of the last n tokens of a text, by the name of the output


@dataclass(frozen=True)
class _Text:
    """The inputs of some tokens by name; `timed` are the names of those with a value for each token."""

    inputs: dict[str, Tensor]
    ids: dict[str, int | None]  # how many ids an input has; None for numbers
    timed: Collection[str]

    def __len__(self) -> int:
        return next(x.shape[1] for name, x in self.inputs.items() if name in self.timed)

    @property
    def rows(self) -> int:
        return len(next(iter(self.inputs.values())))

    def __getitem__(self, at: tuple[slice, slice]) -> _Text:
        """Some rows, and some tokens of them."""
        rows, tokens = at
        return self._of({n: x[rows, tokens] if n in self.timed else x[rows] for n, x in self.inputs.items()})

    def __add__(self, other: _Text) -> _Text:
        joined = {
            n: torch.cat([x, other.inputs[n]], dim=1) for n, x in self.inputs.items() if n in self.timed
        }
        return self._of(self.inputs | joined)

    def with_others(self, count: int) -> _Text:
        """The text [1, N], and after it `count` texts that differ from it in every token."""
        return self._of(
            {n: torch.cat([self._moved(n, x, k) for k in range(1 + count)]) for n, x in self.inputs.items()}
        )

    def changed(self, at: slice = slice(None)) -> _Text:
        """The text with other tokens at some places."""
        inputs = {name: x.clone() for name, x in self.inputs.items()}
        for name in self.timed:
            inputs[name][:, at] = self._moved(name, inputs[name][:, at], 1)
        return self._of(inputs)

    def _moved(self, name: str, x: Tensor, by: int) -> Tensor:
        count = self.ids[name]
        return x if name not in self.timed else x + by if count is None else (x + by) % count

    def _of(self, inputs: dict[str, Tensor]) -> _Text:
        return _Text(inputs, self.ids, self.timed)


ALL = slice(None)


class _Streams:
    """Feeds random texts to a module.

    before [rows, P] are whole segments that fill the memory, move it, and pass the end of a ring. `full` is
    the memory after them. tokens [rows, 2 T + 1] follow, from position P on.
    """

    def __init__(self, step: ModuleStep, rule: MemoryRule, form: AnyForm, *, rows: int | None = None) -> None:
        self.step_of = step
        self.module = step.module
        self.rule = rule
        self.circular = FORM_FACTS[form].circular
        self.rows = rows or step.rows or ROWS
        self.name = step.name
        self.outputs = () if step.language_model else step.signature(rule.segment)[1]
        T = rule.segment
        count = math.ceil((max(rule.mem_len, step.moves_every or 0) + 2 * T) / T)
        text = self.random_text(self.rows, count * T + 2 * T + 1)
        self.before = text[ALL, : count * T]
        self.tokens = text[ALL, count * T :]

    def random_text(self, rows: int, count: int) -> _Text:
        inputs = self.step_of.inputs
        drawn = {name: drawn_input(each, rows, count) for name, each in inputs.items()}
        ids = {name: each.ids for name, each in inputs.items()}
        return _Text(drawn, ids, [name for name, each in inputs.items() if each.timed])

    def start(self) -> tuple[Tensor, ...]:
        return self.step_of.start(self.rows)

    @cached_property
    def full(self) -> tuple[Tensor, ...]:
        return self.feed(self.before, self.cut(len(self.before)))[1]

    @property
    def follows(self) -> int:
        """The position P after the text that fills the memory."""
        return len(self.before)

    def feed(
        self,
        text: _Text,
        lengths: Sequence[int],
        memory: Sequence[Tensor] | None = None,
        first: int | Sequence[int] = 0,
    ) -> tuple[Answers, tuple[Tensor, ...]]:
        """The answers to segments of these lengths, and the memory after the last.

        memory: the memory of new streams when it is None. first: the stream position of the first token, of
        all rows or of each.
        """
        after = self.step_of.start(text.rows) if memory is None else tuple(memory)
        start = torch.as_tensor(first).expand(text.rows)[:, None]
        pieces: dict[str, list[Tensor]] = {}
        at = 0
        for length in lengths:
            answers, after = self.answers(
                text[ALL, at : at + length],
                start + at + torch.arange(length),
                tuple(x.clone() for x in after),
            )
            for name, answer in answers.items():  # of an output without a value for each token, the last one
                earlier = pieces.get(name, []) if answer.shape[1] == length else []
                pieces[name] = [*earlier, answer]
            at += length
        return {name: torch.cat(parts, dim=1) for name, parts in pieces.items()}, after

    def answers(
        self, text: _Text, positions: Tensor, memory: Sequence[Tensor]
    ) -> tuple[Answers, tuple[Tensor, ...]]:
        """The answers to one segment: log p [B, T, V] of a language model, and otherwise each output, as
        [B, 1, K] if it has no value for each token.
        """
        outputs, after = self.step(text, positions, memory)
        if self.step_of.language_model:
            hidden = outputs[LOGITS]
            with in_a_sentence(self.module, "logits", hidden=hidden):
                return {LOGITS: self.step_of.logits(hidden).log_softmax(dim=-1)}, after
        counts = {fact.name: len(text) if "tokens" in fact.shape else 1 for fact in self.outputs}
        return {n: outputs[n].float().reshape(text.rows, count, -1) for n, count in counts.items()}, after

    def step(
        self, text: _Text, positions: Tensor, memory: Sequence[Tensor]
    ) -> tuple[dict[str, Tensor], tuple[Tensor, ...]]:
        fed = {"tokens": text.inputs["input_ids"]} if self.step_of.language_model else text.inputs
        with in_a_sentence(self.module, "step", self.step_of.rows, **fed, positions=positions):
            return self.step_of(text.inputs, positions, memory)

    @property
    def tolerance(self) -> float:
        """The largest difference between two ways to compute the same."""
        return max(TOLERANCE, ROUNDINGS * self.step_of.rounding)

    @property
    def mean_tolerance(self) -> float:
        """The same for the mean difference."""
        return max(TOLERANCE, ROUNDINGS * self.step_of.mean_rounding)

    def cut(self, count: int) -> list[int]:
        """The lengths of whole segments that cover `count` tokens, and of what is left."""
        T = self.rule.segment
        return [T] * (count // T) + ([count % T] if count % T else [])

    def difference(self, mine: Answers, theirs: Answers) -> float:
        """The largest difference of the tokens that both have, in nats; of outputs, relative above 1."""
        return float(self.differences(mine, theirs).max())  # NaN if one is

    def differences(self, mine: Answers, theirs: Answers) -> Tensor:
        """All of them; at least one."""
        found = [torch.zeros(1)]
        for name, one in mine.items():
            count = min(one.shape[1], theirs[name].shape[1])
            ours = one[:, one.shape[1] - count :]
            other = theirs[name][:, theirs[name].shape[1] - count :]
            if not self.step_of.language_model:
                scale = other.abs().clamp(min=1)
                ours = ours / scale
                other = other / scale
            # Impossible tokens are -inf on both sides, and do not differ. NaN stays NaN.
            found.append((ours - other).abs().masked_fill(ours == other, 0).flatten())
        return torch.cat(found)

    def refuse_difference(self, mine: Answers, theirs: Answers, *, what: str, fix: str) -> None:
        apart = self.differences(mine, theirs)
        for found, limit, which in (
            (float(apart.max()), self.tolerance, ""),
            (float(apart.mean()), self.mean_tolerance, " in the mean"),
        ):
            if not found <= limit:
                by = f"{found:.3g}{' nats' if self.step_of.language_model else ''}{which}"
                raise ArtefactError(f"{self.name} gives other answers {what}, by {by}; {fix}.")


def _last(answers: Answers, count: int) -> Answers:
    """The answers to the last tokens."""
    return {name: x[:, max(0, x.shape[1] - count) :] for name, x in answers.items()}


def _shapes(streams: _Streams) -> None:
    T = streams.rule.segment
    before = streams.start()
    B = streams.rows
    outputs, after = streams.step(streams.tokens[ALL, :T], torch.arange(T).expand(B, -1), before)
    if streams.step_of.language_model:
        V = streams.module.sizes.vocab_size
        hidden = outputs[LOGITS]
        with in_a_sentence(streams.module, "logits", hidden=hidden):
            logits = streams.step_of.logits(hidden)
        if hidden.shape[:2] != (B, T) or logits.shape != (B, T, V):
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


def _rounding(streams: _Streams) -> tuple[float, float]:
    """The largest and the mean change of a module's answers if each of its weights is rounded once more; 0
    for what is far below the usual tolerance.

    Two ways to compute the same in float32 differ by roundings of this size. Some deep recurrent models
    multiply them, so no fixed tolerance suits all modules. The largest may be of one rare token, so the mean
    shows an error of all tokens that is smaller.
    """
    text = streams.before + streams.tokens
    lengths = streams.cut(len(text))
    right = streams.feed(text, lengths)[0]
    # `data`, because what checks the module afterwards takes a change in place for one of the step.
    weights = [x.data for x in streams.module.parameters() if x.is_floating_point()]
    kept = [x.clone() for x in weights]
    worst = mean = 0.0
    chance = torch.Generator().manual_seed(0)
    try:
        for _ in range(ROUNDED):
            for weight, exact in zip(weights, kept, strict=True):
                weight.copy_(exact * (1 + torch.randn(exact.shape, generator=chance) * 2**-24))
            apart = streams.differences(streams.feed(text, lengths)[0], right)
            worst, mean = max(worst, float(apart.max())), max(mean, float(apart.mean()))
    finally:
        for weight, exact in zip(weights, kept, strict=True):
            weight.copy_(exact)
    if not worst <= MAX_ROUNDING:  # nor for a NaN
        raise ArtefactError(
            f"the answers of {streams.name} change by {worst:.3g} if each weight is rounded once more in "
            "float32, so no graph can be compared with it; trace a module that is trained."
        )
    most, usual = (x if ROUNDINGS * x > TOLERANCE else 0.0 for x in (worst, mean))
    return most, usual


def _positions_have_no_end(streams: _Streams) -> None:
    T = streams.rule.segment
    far = FAR // T * T
    try:
        positions = far + torch.arange(T).expand(streams.rows, -1)
        streams.step(streams.tokens[ALL, :T], positions, streams.start())
    except ArtefactError as error:
        reason = first_line(error.__cause__ or error)
        raise ArtefactError(
            f"{streams.name} works at position 0 and not at position {far:,} ({reason}), "
            "as with a table that has a row for each position; a stream has no end: use distances, "
            "`positions % N`, or `positions.clamp(max=N - 1)`."
        ) from error


def _numbers(streams: _Streams) -> None:
    text = streams.tokens
    lengths = streams.cut(len(text))
    answers = [
        *streams.feed(text, lengths)[0].values(),
        *streams.feed(text, lengths, streams.full, streams.follows)[0].values(),
    ]
    if any(bool(answer.isnan().any()) for answer in answers):
        what = "log-probabilities" if streams.step_of.language_model else "outputs"
        raise DivergedError(
            f"{streams.name} gives {what} that are not numbers; trace a module from before the loss diverged."
        )


def _log_probs(streams: _Streams) -> None:
    """`log_prob`, if a language model has it, agrees with its logits."""
    if not streams.step_of.language_model or getattr(streams.module, "log_prob", None) is None:
        return
    T = streams.rule.segment
    text = streams.tokens[ALL, :T]
    output = streams.step_of
    targets = streams.tokens[ALL, T : 2 * T].inputs["input_ids"].flatten()
    positions = torch.arange(T).expand(streams.rows, -1)
    hidden = streams.step(text, positions, streams.start())[0][LOGITS].flatten(0, 1)
    with in_a_sentence(streams.module, "log_prob", hidden=hidden, targets=targets):
        mine = output.log_prob(hidden, targets)
    if mine.shape != targets.shape:
        raise ArtefactError(
            f"{streams.name}.log_prob gives {list(mine.shape)}; expected one number for each of "
            f"{len(targets)} targets."
        )
    theirs = output.logits(hidden).log_softmax(dim=-1).gather(-1, targets[:, None])[:, 0]
    possible = theirs.isfinite()  # what log_prob says of the padding of a vocabulary does not matter
    streams.refuse_difference(
        {LOGITS: mine[None, possible]},
        {LOGITS: theirs[None, possible]},
        what="by log_prob and by logits",
        fix="let both be of the same distribution",
    )


def _repeats(streams: _Streams) -> None:
    lengths = streams.cut(len(streams.tokens))
    first, second = (streams.feed(streams.tokens, lengths)[0] for _ in range(2))
    streams.refuse_difference(
        first, second, what="to the same text twice", fix="switch off what draws at random"
    )


def _rows_are_independent(streams: _Streams) -> None:
    """In turns, rows continue a text, begin a text, and are padded before a text."""
    # A module may treat a few rows and many rows in different ways, as with a table that has a row for each.
    text = streams.random_text(MANY_ROWS, len(streams.tokens))
    row = torch.arange(MANY_ROWS)
    full = [x[row % streams.rows] for x in streams.full]
    starts = [streams.follows, 0, -min(PADDING, len(text) - 1)]
    first = [starts[each] for each in (row % len(starts)).tolist()]
    lengths = streams.cut(len(text))
    together, _ = streams.feed(text, lengths, full, first)
    for each in range(MANY_ROWS):
        one = slice(each, each + 1)
        alone, _ = streams.feed(text[one, ALL], lengths, [x[one] for x in full], first[each])
        count = len(text) - max(0, -first[each])
        streams.refuse_difference(
            _last({name: x[one] for name, x in together.items()}, count),
            _last(alone, count),
            what=f"at position {first[each]} beside texts at other positions",
            fix="let no row of a batch depend on another, and give each row its own positions",
        )


def _future_is_hidden(streams: _Streams) -> None:
    T = streams.rule.segment
    text = streams.tokens[:1, :T]
    if T == 1:
        return
    full = [x[:1] for x in streams.full]
    one, _ = streams.feed(text, [T], full, streams.follows)
    for place in torch.linspace(1, T - 1, min(CHANGED, T - 1)).long().tolist():
        answers, _ = streams.feed(text.changed(slice(place, place + 1)), [T], full, streams.follows)
        streams.refuse_difference(
            {name: x[:, :place] for name, x in one.items()},
            {name: x[:, :place] for name, x in answers.items()},
            what="before a token that changes",
            fix="mask the tokens that are to come",
        )


def _memory_counts(streams: _Streams) -> None:
    """What was fed before must make a difference, in the tensors and in the answers."""
    T = streams.rule.segment
    # A token more than the memory needs to be filled, or to move: a token may reach a tensor, or an answer,
    # only after M others. A memory that moves a segment at a time also holds an unfinished segment.
    N = max(streams.rule.mem_len, streams.step_of.moves_every or 0) + 1

    def memories(count: int) -> list[tuple[Tensor, ...]]:
        text = streams.random_text(streams.rows, count)
        return [streams.feed(each, streams.cut(count))[1] for each in (text, text.changed())]

    full = memories(N)
    for number, (old, *new) in enumerate(zip(streams.start(), *full, strict=True)):
        # A tensor that counts tokens is the same after every text, but not the one that was given.
        if old.numel() and all(bool(x.eq(old).all()) for x in new):
            raise ArtefactError(
                f"memory tensor {number} of {streams.name} is the same after every text; return the memory "
                "after the segment, not the one before it."
            )
    following = streams.tokens[ALL, T : 2 * T]
    for count in (N, N - 1):  # a policy may forget everything after N tokens, at the end of an episode
        kept = full if count == N else memories(count)
        answers = [streams.feed(following, [T], memory, first=count)[0] for memory in kept]
        if _differ(answers[0].values(), answers[1].values()):
            return
    raise ArtefactError(
        f"the answers of {streams.name} do not depend on its memory; read the memory in `step`, or start "
        "none."
    )


def _restarts(streams: _Streams) -> None:
    """A row at position 0 sees nothing of its old memory, if need be because the step replaces it."""
    T = streams.rule.segment
    text = streams.tokens[ALL, T : 2 * T]
    again, _ = streams.feed(text, [T], streams.full)
    fresh, _ = streams.feed(text, [T])
    starts_with_zeros = not any(bool(x.any()) for x in streams.start())
    if not streams.circular and not (
        starts_with_zeros and streams.difference(again, fresh) <= streams.tolerance
    ):
        streams.step_of.restart_rows()
        return
    if not starts_with_zeros:
        raise ArtefactError(
            f"the ring with which {streams.name} starts is not zero; expected zeros: let `step` hide the "
            "ring of rows whose position is 0."
        )
    streams.refuse_difference(
        again,
        fresh,
        what="to a text that starts at position 0 with the memory of another one",
        fix="hide the memory from before position 0, by the positions that `step` is given",
    )


def _padding(streams: _Streams) -> None:
    """Padding cuts the first segment of a text; both sides are cut in the same places."""
    T = streams.rule.segment
    count = min(PADDING, T - 1) or PADDING  # a segment of one token is padding or text
    text = streams.tokens[ALL, : 2 * T - (count if T > 1 else 0)]
    padded = streams.tokens[ALL, :count] + text
    answers, _ = streams.feed(padded, streams.cut(len(padded)), streams.full, first=-count)
    alone, _ = streams.feed(text, [T - count, T] if T > 1 else [1] * len(text))
    streams.refuse_difference(
        answers,
        alone,
        what="after padding at negative positions",
        fix="hide tokens at negative positions from those after them",
    )


def _cuts_agree(streams: _Streams) -> None:
    """A text in segments and token by token has the same answers, from position 0 on and later."""
    N = len(streams.tokens)
    cuts = [streams.cut(N), [1, *streams.cut(N - 1)]]
    fix = (
        "show every token the M tokens before it and no others, in the segment too, or give a rule with "
        'mask="full", or with segment=1 for a step of one token'
    )
    if streams.step_of.moves_every:
        fix = "let a token use the earlier tokens of its segment alike, from the memory and from the step"
        if streams.rule.segment == 1:  # the original project feeds whole segments
            cuts = [[2, 1], [1, 2]]
    for memory, first in ((None, 0), (streams.full, streams.follows)):
        ones, _ = streams.feed(streams.tokens, [1] * N, memory, first)
        for lengths in cuts:
            segments, _ = streams.feed(streams.tokens, lengths, memory, first)
            streams.refuse_difference(
                segments,
                ones,
                what="in segments and token by token",
                fix=fix,
            )


def _cuts_matter(streams: _Streams) -> None:
    """If the window grows, the later tokens of a segment see more than M tokens, so the cuts matter."""
    N = len(streams.tokens)
    rule = streams.rule
    answers = [
        streams.feed(streams.tokens, lengths, streams.full, streams.follows)[0]
        for lengths in (streams.cut(N), [1] * N)
    ]
    if streams.difference(*answers) <= streams.tolerance:
        raise ArtefactError(
            f"every token of {streams.name} looks back {rule.mem_len} tokens, however a text is cut; with "
            f'mask="full" the last one of a segment looks back {rule.longest_distance}; give '
            'mask="same-length".'
        )


def _looks_back(streams: _Streams) -> None:
    """The memory holds the M tokens of the rule, and no token reads one that is further away."""
    M = streams.rule.mem_len
    name = streams.name
    # Every distance, as a module with strides may read 2 M and not M + 1. Each costs a step of one token, but
    # only while the memory still holds something of the token: a memory of M tokens ends the scan at once.
    if found := _furthest_read(streams, M + 1, 4 * streams.rule.slots):
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
        found = _furthest_read(streams, 1, M)
        warnings.warn(
            f"{name} looks back {found} tokens and the rule says mem_len={M}, which is right only if "
            "weights decay to zero, as those of learned spans do; otherwise give "
            f"mem_len={found}, or show all {M}.",
            stacklevel=4,
        )


@dataclass(frozen=True)
class _Trace:
    """Whether the memory still holds a token, and whether the next token reads it there."""

    distance: int
    held: bool
    read: bool


def _furthest_read(streams: _Streams, nearest: int, furthest: int) -> int:
    """The longest of these distances at which a token is read; 0 for none."""
    return max((trace.distance for trace in _traces(streams, nearest, furthest) if trace.read), default=0)


def _trace_of(streams: _Streams, distance: int) -> _Trace:
    return next(_traces(streams, distance, distance), _Trace(distance, held=False, read=False))


def _traces(streams: _Streams, nearest: int, furthest: int) -> Iterator[_Trace]:
    """What is left of a token, seen by those that are `nearest` to `furthest` tokens after it, as long as
    the memory holds it.

    Two texts differ only in this token. Layers pass it on: the tokens after it have read it, so what they
    write into the memory differs too, and a text reaches further back than any layer looks. So whatever a
    later segment writes is set equal in both memories. These are the numbers that change with its tokens.
    """
    text = streams.random_text(1, furthest).with_others(OTHERS)
    pair = _two_texts(streams)
    at = 0
    for length in [*streams.cut(nearest - 1), *[1] * (furthest - nearest + 1)]:
        held = _differ(*pair)
        (one, after), (other, others) = (
            streams.feed(
                text[ALL, at : at + length],
                [length],
                [x.expand(text.rows, *x.shape[1:]) for x in memory],
                streams.follows + 1 + at,
            )
            for memory in pair
        )
        if at >= nearest - 1:
            answers = ([x[:1] for x in each.values()] for each in (one, other))
            yield _Trace(distance=at + 1, held=held, read=_differ(*answers))
        if not held:
            return
        written = [
            (one != one[:1]).any(dim=0) | (other != other[:1]).any(dim=0)
            for one, other in zip(after, others, strict=True)
        ]
        first = [x[:1] for x in after]
        pair = first, [torch.where(*x) for x in zip(written, first, [x[:1] for x in others], strict=True)]
        at += length


def _is_recurrent(streams: _Streams, held: int) -> bool:
    """Whether a token still matters where layers that look back `held` tokens can no longer pass it on.

    So each token writes anew what it has read, and the memory has no length.
    """
    segment = max(1, min(held, streams.rule.segment))
    sizes = getattr(streams.module, "sizes", None)
    layers = max(sizes.layers if sizes else 1, len(streams.full))
    text = streams.random_text(1, layers * (held + segment - 1) + 1)
    lengths = [segment] * (len(text) // segment) + [1] * (len(text) % segment)
    one, other = (streams.feed(text, lengths, x, streams.follows + 1) for x in _two_texts(streams))
    sides = [[*_last(answers, 1).values(), *memory] for answers, memory in (one, other)]
    return _differ(*sides)


def _two_texts(streams: _Streams) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """The memories [1, …] after two texts of which only the last token differs."""
    token = streams.tokens[:1, :1]
    full = [x[:1] for x in streams.full]
    one, other = (streams.feed(last, [1], full, streams.follows)[1] for last in (token, token.changed()))
    return one, other


def _differ(one: Iterable[Tensor], other: Iterable[Tensor]) -> bool:
    """Whether any bit differs: both come from computations of the same shape, so rounding does not."""
    return not all(torch.equal(x, y) for x, y in zip(one, other, strict=True))


def _largest(holds: Callable[[int], bool], low: int, high: int) -> int:
    """The largest number from low to high for which something holds, by bisection; it holds for low."""
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low


def _uneven_rows(streams: _Streams) -> None:
    """On a ring, the rows of a step may have unequal lengths: padding at their ends changes nothing."""
    T = streams.rule.segment
    P = streams.follows
    one = streams.tokens[ALL, :1]
    rest = streams.tokens[ALL, T:]
    padded = streams.tokens[ALL, :T]  # its first token is text, and the others are padding
    lengths = [1] * len(rest)
    begun, memory = streams.feed(padded, [T], streams.full, first=P)
    answers, _ = streams.feed(rest, lengths, memory, first=P + 1)
    alone, memory = streams.feed(one, [1], streams.full, first=P)
    expected, _ = streams.feed(rest, lengths, memory, first=P + 1)
    if streams.step_of.language_model:  # no other step is given lengths
        answers[LOGITS] = torch.cat([begun[LOGITS][:, :1], answers[LOGITS]], dim=1)
        expected[LOGITS] = torch.cat([alone[LOGITS], expected[LOGITS]], dim=1)
    streams.refuse_difference(
        answers,
        expected,
        what="in or after a step that was padded at its end",
        fix="hide what a ring holds beyond the M tokens before a token, by xl_export.ring_distances, and "
        "use no length of the segment",
    )


def _listed(memory: Sequence[Tensor]) -> str:
    return (
        ", ".join(f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}" for x in list(memory)[:3])
        or "no tensors"
    )

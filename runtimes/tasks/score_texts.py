"""Scoring many texts that do not belong together: sentences, hypotheses of a recogniser, answers to choose.

Each text has a stream of its own, and the memory holds only its own past. Texts of similar lengths are rows
of a batch.

The rows are padded on the right. What follows the last token of a stream is never seen by the tokens before
it, in any form of memory. And each text is cut into segments at the places at which it is cut when it is
scored by itself, which matters under the full mask. Contexts are followed by texts, so their rows must end
together: they are padded on the left, at negative positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from runtimes.base.errors import UserError
from runtimes.base.logits import clamped
from runtimes.base.ranges import POSITIVE
from runtimes.contract.memory import Memory
from runtimes.contract.session import Session
from runtimes.contract.tensors import row_bytes
from runtimes.tasks.evaluate import not_a_number
from runtimes.tasks.text_rows import Context, Reader, Row, TextToScore, tokens_around

WINDOW_TOKENS = 1 << 16  # tokens
MAX_ROWS = 32
MAX_STEP_TOKENS = 1024  # of a step, padding included; more of them are not faster on any machine measured
STATE_BYTES = 320 << 20  # of the memory of the largest batch
LOGIT_BYTES = 128 << 20  # of the logits of a step, and of the arrays made of them
STEP_TOKENS = 16  # a step costs about as much as this many tokens beyond those that it is given


@dataclass(frozen=True, kw_only=True)
class TextScore:
    """The log-probability of a text."""

    number: int
    """Number of the text in the input, from 1."""
    id: Any
    """Id from the input; by default `number`."""
    log_prob: float
    """Log-probability in nats, summed over the predicted tokens; an impossible one counts as `IMPOSSIBLE`."""
    tokens: int
    """Number of tokens predicted."""
    unknown: int
    """Number of the text's own tokens that are the unknown token."""
    characters: int | None
    """Of the predicted text, without an end token, and without the first token if that was not predicted;
    None for ids.
    """
    num_bytes: int | None
    """The same in bytes of UTF-8."""
    whole: bool
    """Whether all tokens of the text were predicted, except a beginning-of-text token of its own."""
    source: TextToScore
    """The input."""
    token_ids: np.ndarray = field(repr=False)
    """The predicted tokens."""
    token_log_probs: np.ndarray | None = field(default=None, repr=False)
    """Log-probability of each predicted token in nats, if `score_texts` was asked for them."""


def score_texts(
    session: Session,
    texts: Iterable[str | Sequence[int] | TextToScore],
    *,
    bos: bool = False,
    eos: bool = False,
    tokens: bool = False,
    batch: int | None = None,
    window: int = WINDOW_TOKENS,
    progress: Callable[[int], None] = lambda done: None,
) -> Iterator[TextScore]:
    """Yields the score of each text, in the order of the input, as if each were scored by itself.

    The first token of a text is predicted from the last token of its context. Without context it is predicted
    from the beginning-of-text token with `bos`, and otherwise not at all. The context itself is not scored.

    bos: the vocabulary's token before a text (`SpecialTokens.before_text`) is put before the context, or
    before the text if there is no context, unless it is there already. eos: the token after a text
    (`SpecialTokens.after_text`) is predicted as the last one, unless the text ends with it already. tokens:
    the scores have `token_log_probs`. batch: the most rows of a step; None chooses. window: texts are read
    ahead until they have this many tokens, then sorted by length and scored. Their contexts count once. A
    context is fed once for all texts of a window that share it. progress: called after every batch with the
    number of tokens predicted so far.

    An error in a text is raised after the scores of all texts before it.

    Raises UserError if the vocabulary lacks the token of `bos` or `eos`, TextError for a text that the
    vocabulary cannot hold, DivergedError for a log-probability that is not a number.
    """
    if isinstance(texts, str | bytes | TextToScore):
        raise UserError(f"texts is one text ({texts!r:.40}); give a list of texts, such as [text].")
    before, after = tokens_around(session.vocab, bos=bos, eos=eos)
    POSITIVE.check("window", window)
    if batch is not None:
        POSITIVE.check("batch", batch)
    scorer = _Scorer(session, BatchLimits.of(session, rows=batch), progress)
    reader = Reader(session.vocab, iter(texts), before, after, window)
    return _score_windows(reader, scorer, keep=tokens)


def _score_windows(reader: Reader, scorer: _Scorer, *, keep: bool) -> Iterator[TextScore]:
    while True:
        rows, error = reader.next_window()
        for row, log_probs in zip(rows, map(clamped, scorer.log_probs(rows)), strict=True):
            if (wrong := np.flatnonzero(np.isnan(log_probs))).size:
                raise not_a_number(scorer.session, f"token {wrong[0] + 1} to predict of {row.place}")
            yield TextScore(
                number=row.number,
                id=row.number if row.source.id is None else row.source.id,
                log_prob=float(log_probs.sum(dtype=np.float64)),
                tokens=len(log_probs),
                unknown=row.unknown,
                characters=None if row.size is None else row.size.characters,
                num_bytes=None if row.size is None else row.size.num_bytes,
                whole=row.whole,
                source=row.source,
                token_ids=row.targets,
                token_log_probs=log_probs if keep else None,
            )
        if error is not None:
            raise error
        if not rows:
            return


class _Scorer:
    """Scores the rows of a window; keeps one memory of each size from batch to batch."""

    def __init__(self, session: Session, limits: BatchLimits, progress: Callable[[int], None]) -> None:
        self.session = session
        self._limits = limits
        self._progress = progress
        self._memories: dict[int, Memory] = {}
        self._done = 0

    def log_probs(self, rows: Sequence[Row]) -> list[np.ndarray]:
        """The log-probabilities [tokens] of each row."""
        answers = [np.zeros(max(0, len(row.stream) - 1), np.float32) for row in rows]
        # One batch of contexts is in memory at a time, and the texts that follow these are scored together.
        by_context: dict[Context, list[int]] = {}
        for index, row in enumerate(rows):
            if len(answers[index]):
                by_context.setdefault(row.context, []).append(index)
        alone = [index for c, own in by_context.items() if not len(c.fed) for index in own]
        self._score(rows, alone, answers)
        contexts = [context for context in by_context if len(context.fed)]
        for some in self._batches([len(context.fed) for context in contexts], contexts=True):
            memory = self._fed([contexts[index] for index in some])
            source = {text: at for at, index in enumerate(some) for text in by_context[contexts[index]]}
            self._score(rows, list(source), answers, memory, list(source.values()))
        return answers

    def _batches(self, lengths: Sequence[int], *, contexts: bool = False) -> list[np.ndarray]:
        """Batches that may be padded where padding changes no score."""
        if not lengths:
            return []
        # If scores depend on the cuts, a stream must be cut where it is cut when it is fed by itself, so a
        # context may not be padded on the left.
        paddable = self.session.rule.cuts_change_nothing or not contexts
        padding = self.session.pads_right and paddable
        return make_batches(lengths, self._limits, padding=padding)

    def _fed(self, contexts: Sequence[Context]) -> Memory:
        """The memory of streams that have seen all tokens of their contexts but the last."""
        longest = max(len(context.fed) for context in contexts)
        memory = self._memory(len(contexts))
        memory.positions[:] = [len(context.fed) - longest for context in contexts]
        inputs = np.stack([np.pad(context.fed, (longest - len(context.fed), 0)) for context in contexts])
        segment = self._limits.segment
        for at in range(0, longest, segment):
            piece = inputs[:, at : at + segment]
            self._step(piece, np.full_like(piece, -1), memory)
        return memory

    def _score(
        self,
        rows: Sequence[Row],
        chosen: Sequence[int],
        answers: list[np.ndarray],
        contexts: Memory | None = None,
        source: Sequence[int] = (),
    ) -> None:
        """Fills the answers of the chosen rows.

        source: the row of `contexts` that holds the past of each of them.
        """
        for batch in self._batches([len(answers[index]) for index in chosen]):
            texts = [rows[chosen[at]] for at in batch]
            if contexts is None:
                memory = self._memory(len(texts))
                memory.positions[:] = 0
            else:
                memory = contexts.select([source[at] for at in batch])
            log_probs = self._score_batch(texts, memory)
            for row, at in enumerate(batch):
                answer = answers[chosen[at]]
                answer[:] = log_probs[row, : len(answer)]
                self._done += len(answer)
            self._progress(self._done)

    def _score_batch(self, texts: Sequence[Row], memory: Memory) -> np.ndarray:
        """Log-probabilities [B, N] of texts of at most N predicted tokens."""
        longest = max(len(text.targets) for text in texts)
        segment = self._limits.segment
        inputs = np.zeros((len(texts), longest), np.int64)
        targets = np.full((len(texts), longest), -1, np.int64)
        for row, text in enumerate(texts):
            inputs[row, : len(text.targets)], targets[row, : len(text.targets)] = (
                text.stream[:-1],
                text.targets,
            )
        pieces = [slice(at, at + segment) for at in range(0, longest, segment)]
        return np.concatenate([self._step(inputs[:, p], targets[:, p], memory) for p in pieces], axis=1)

    def _step(self, inputs: np.ndarray, targets: np.ndarray, memory: Memory) -> np.ndarray:
        # A session that has not computed the last output of a row cannot know that it is finite, and clears
        # the row before its next text, which may take as long as the text. So a target is always wanted
        # there: any token behind a text.
        targets[:, -1] = np.maximum(targets[:, -1], 0)
        log_probs, _ = self.session.score(inputs, targets, memory)
        return log_probs

    def _memory(self, rows: int) -> Memory:
        """A memory of that many rows, at any positions. Making one takes longer than scoring a short text."""
        if rows not in self._memories:
            self._memories[rows] = self.session.start(rows)
        return self._memories[rows]


@dataclass(frozen=True, kw_only=True)
class BatchLimits:
    """The largest batch."""

    rows: int
    """Number of rows of a batch."""
    tokens: int
    """Number of tokens of a step, padding included."""
    segment: int
    """Number of tokens of a row in a step."""

    @classmethod
    def of(cls, session: Session, *, rows: int | None = None) -> BatchLimits:
        """The limits that keep the arrays of a session's step within a few hundred MB.

        rows: the largest number of rows, if the user gives one.
        """
        if rows is None:
            rows = max(1, min(MAX_ROWS, STATE_BYTES // max(1, row_bytes(session.state))))
        tokens = MAX_STEP_TOKENS
        if session.spec is None or not session.spec.model.selective:  # such a graph computes fewer logits
            tokens = max(1, min(tokens, LOGIT_BYTES // (3 * 4 * session.vocab.size)))
        return cls(rows=rows, tokens=tokens, segment=session.rule.segment)

    @property
    def sizes(self) -> list[int]:
        """The numbers of rows that batches have: powers of 2, and the largest.

        There are few of them, so that one memory of each size serves all batches.
        """
        return sorted({self.rows, *(1 << bits for bits in range(self.rows.bit_length()))})


def make_batches(lengths: Sequence[int], limits: BatchLimits, *, padding: bool) -> list[np.ndarray]:
    """Indices of `lengths` in batches: all of them, each once, the longest first.

    Their rows are padded to the longest of the batch. Of all ways to cut the sorted lengths, this one costs
    the least: the tokens of all steps with their padding, and STEP_TOKENS for each step. padding: False puts
    only equal lengths together.
    """
    order = np.argsort(-np.asarray(lengths, np.int64), kind="stable")
    ordered = [int(lengths[index]) for index in order]
    count = len(ordered)
    # costs[i] is the least cost of the first i rows, and cuts[i] the size of the last batch of that way.
    costs = [0.0] + [float("inf")] * count
    cuts = [0] * (count + 1)
    for first, longest in enumerate(ordered):
        most = max(1, limits.tokens // min(longest, limits.segment))
        step_costs = STEP_TOKENS * -(-longest // limits.segment)
        for size in limits.sizes:
            end = first + size
            if end > count or size > most or (not padding and ordered[end - 1] != longest):
                break
            cost = costs[first] + size * longest + step_costs
            if cost < costs[end]:
                costs[end], cuts[end] = cost, size
    batches = []
    end = count
    while end > 0:
        batches.append(order[end - cuts[end] : end])
        end -= cuts[end]
    return batches[::-1]

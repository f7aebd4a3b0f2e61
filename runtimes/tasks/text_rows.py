"""Reads texts to score in windows, and encodes them with what comes before and after them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from runtimes.base.errors import TextError, UserError
from runtimes.base.ranges import ANY
from runtimes.contract.checks import checked_ids
from runtimes.contract.tokens import ReadText, TextSize, predicted_size
from runtimes.contract.vocabulary import Vocab, WordVocab, not_unicode

NOTHING = np.empty(0, np.int64)


@dataclass(frozen=True, kw_only=True)
class TextToScore:
    """A text to score, and its context."""

    text: str | Sequence[int]
    """The text, or its token ids."""
    context: str | Sequence[int] = ""
    """What comes before the text; it is not scored."""
    id: Any = None
    """Returned with the score; None for the number of the text."""
    group: Any = None
    """The group of an n-best list: see `best_of_groups`."""
    score: float | None = None
    """The text's own score in its group."""
    place: str | None = None
    """The name of the text in error messages, such as "line 7"."""

    def __post_init__(self) -> None:
        if self.score is not None:
            ANY.check(f"the score of {self.place or 'a text'}", self.score, TextError)


@dataclass(frozen=True, kw_only=True, eq=False)
class Context:
    """What all texts of a window share that have the same context."""

    fed: np.ndarray
    """The tokens that are fed before the texts, without the last one. The text's first token is predicted
    from that one, so it is the first input of each text.
    """
    last: np.ndarray
    """The last token of the context [1], or an empty array."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A text of the window."""

    number: int
    source: TextToScore
    context: Context
    stream: np.ndarray
    """Token ids; each predicts the next one."""
    unknown: int
    size: TextSize | None
    """Size of the predicted text; None for ids."""
    whole: bool
    """Whether the whole text is predicted: its first token has a token before it."""

    @property
    def place(self) -> str:
        return self.source.place or f"text {self.number}"

    @property
    def targets(self) -> np.ndarray:
        return self.stream[1:]


def tokens_around(vocab: Vocab, *, bos: bool, eos: bool) -> tuple[int | None, int | None]:
    """The tokens before and after each text; None for one that is not wanted. Raises UserError if the
    vocabulary lacks one that is.
    """
    before = vocab.special.before_text if bos else None
    after = vocab.special.after_text if eos else None
    for option, wanted, token, place in (("bos", bos, before, "before"), ("eos", eos, after, "after")):
        if wanted and token is None:
            raise UserError(
                f"{option} needs a token {place} a text, and the {vocab.kind} vocabulary of this model has "
                f"none; leave {option} out."
            )
    return before, after


class Reader:
    """Reads the input in windows, and encodes it."""

    def __init__(
        self,
        vocab: Vocab,
        texts: Iterator[str | Sequence[int] | TextToScore],
        before: int | None,
        after: int | None,
        window: int,
    ) -> None:
        """before, after: the tokens to put there, if any. window: in tokens, as in `score_texts`."""
        self._vocab = vocab
        self._texts = texts
        self._window = window
        self._before = _as_ids(before)
        self._after = _as_ids(after)
        self._numbers = itertools.count(1)

    def next_window(self) -> tuple[list[Row], Exception | None]:
        """The next texts, and the error that ended them; no texts at the end of the input."""
        rows: list[Row] = []
        size = 0
        try:
            for row, read in self.rows():
                rows.append(row)
                size += read
                if size >= self._window:
                    break
        except Exception as error:  # of the caller's own iterator, too
            return rows, error
        return rows, None

    def rows(self) -> Iterator[tuple[Row, int]]:
        """The next texts one by one, each with the number of tokens that were read for it. Those with equal
        contexts share one.
        """
        contexts: dict[Any, Context] = {}
        for item in self._texts:
            yield self._row(item, contexts)

    def _row(self, item: str | Sequence[int] | TextToScore, contexts: dict[Any, Context]) -> tuple[Row, int]:
        """The next text, and how many tokens were read for it."""
        number = next(self._numbers)
        source = item if isinstance(item, TextToScore) else TextToScore(text=item)
        place = source.place or f"text {number}"
        context, fed = self._context(source.context, f"the context of {place}", contexts)
        own = self._encode(source.text, place)
        if isinstance(source.text, str) and len(context.last):
            own = _continued(self._vocab, own, source.context, context)
        special = self._vocab.special
        before = context.last
        # One token may stand before a text and after it; where it is all that a text has, it is its end.
        only_end = len(own) == 1 and _ends(own, self._after)
        if len(before) == 0 and (only_end or not _begins(own, self._before)):
            before = self._before
        after = NOTHING if _ends(own, self._after) else self._after
        row = Row(
            number=number,
            source=source,
            context=context,
            stream=np.concatenate([before, own, after]),
            unknown=0 if special.unknown is None else int((own == special.unknown).sum()),
            size=_size(self._vocab, source.text, own, all_predicted=len(before) > 0),
            whole=len(before) > 0 or _begins(own, _as_ids(special.before_text)),
        )
        return row, 1 + fed + len(row.stream)

    def _context(
        self, context: str | Sequence[int], place: str, contexts: dict[Any, Context]
    ) -> tuple[Context, int]:
        """The context, and how many tokens are fed for it; 0 where the window has it already."""
        # Encoding a text takes longer than finding it again; ids are compared as bytes.
        key = context if isinstance(context, str) else self._encode(context, place).tobytes()
        if key in contexts:
            return contexts[key], 0
        ids = self._encode(context, place)
        if len(ids) and not _begins(ids, self._before):
            ids = np.concatenate([self._before, ids])
        contexts[key] = Context(fed=ids[:-1], last=ids[-1:])
        return contexts[key], len(contexts[key].fed)

    def _encode(self, text: str | Sequence[int], place: str) -> np.ndarray:
        if not isinstance(text, str):
            return checked_ids(text, self._vocab.size, what=place)
        if not text:
            return NOTHING
        if not_unicode([text]) is not None:
            raise TextError(f"{place} has half of a surrogate pair, which is no Unicode text; remove it.")
        try:
            return self._vocab.encode(text)
        except TextError as error:
            raise TextError(f"{place}: {error}") from error


def _continued(vocab: Vocab, own: np.ndarray, before: str | Sequence[int], context: Context) -> np.ndarray:
    """The ids of a text that continues a context. before: that context, as the user wrote it.

    A vocabulary that puts a symbol before each line puts it before any text that it encodes. A text that
    continues the line of its context has none, as a text generated after a prompt has none.
    """
    start = _as_ids(vocab.special.beginning)
    if not isinstance(vocab, WordVocab) or vocab.start_of_line is None or not _begins(own, start):
        return own
    end = vocab.special.end_of_line
    ids = np.concatenate([context.fed, context.last])
    if end is None:  # newlines have no token
        line_ended = isinstance(before, str) and "\n" in before and not before.rpartition("\n")[2].strip()
    elif end != vocab.special.beginning:
        line_ended = bool(ids[-1] == end)
    else:  # there is one symbol before each line and after it
        others = np.flatnonzero(ids != end)
        since = len(ids) - 1 - others[-1] if len(others) else len(ids) - 1
        line_ended = since % 2 == 1
    return own if line_ended else own[1:]


def _size(
    vocab: Vocab, text: str | Sequence[int], own: np.ndarray, *, all_predicted: bool
) -> TextSize | None:
    """The size of the text that is predicted; None for ids. The token that ends a text has no characters."""
    if not isinstance(text, str):
        return None
    num_bytes = len(text.encode())
    if all_predicted:
        return TextSize(characters=len(text), num_bytes=num_bytes)
    if len(own) == 0:
        return TextSize(characters=0, num_bytes=0)
    if vocab.kind == "word" and own[0] == vocab.special.unknown:  # its token has another text than the word
        first = text.split(maxsplit=1)[0] if text.strip() else ""
        return TextSize(characters=len(text) - len(first), num_bytes=num_bytes - len(first.encode()))
    size = predicted_size(ReadText(own, text), vocab)
    if size is None:
        return None
    # A token may decode to more than it was made from, because the library may normalise texts.
    return TextSize(characters=max(0, size.characters), num_bytes=max(0, size.num_bytes))


def _as_ids(token: int | None) -> np.ndarray:
    return NOTHING if token is None else np.array([token], np.int64)


def _begins(ids: np.ndarray, token: np.ndarray) -> bool:
    return len(token) > 0 and len(ids) > 0 and bool(ids[0] == token[0])


def _ends(ids: np.ndarray, token: np.ndarray) -> bool:
    return len(token) > 0 and len(ids) > 0 and bool(ids[-1] == token[0])

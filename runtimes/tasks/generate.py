"""Generating text from prompts of any lengths. Every token costs the same, however long the text becomes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from runtimes.base.errors import StreamError, TextError, UserError
from runtimes.contract.memory import Memory
from runtimes.contract.session import Session
from runtimes.contract.vocabulary import Decoder
from runtimes.tasks.sample import Sampler


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One generated token of one row.

    text: what the token adds to the text of its row. Text that may become a stop string is held back until
    that is decided.
    """

    row: int
    token: int
    text: str


def generate(
    session: Session,
    prompts: str | Sequence[str],
    *,
    max_tokens: int,
    sampler: Sampler | None = None,
    seed: int = 0,
    stop: str | Sequence[str] = (),
    memory: Memory | None = None,
) -> Iterator[Piece]:
    """Yields a Piece per row and step until every row has `max_tokens` tokens or has met a stop string.

    prompts: one text, or a batch of texts of unequal lengths. Under the same-length mask the text of row r
    depends on its prompt, the seed and r alone, and not on the other rows. stop: strings that end a row. A
    stop string and what follows it are not part of the text. memory: streams to continue. They are updated in
    place and have seen all yielded tokens at the end. All prompts must then have equal numbers of tokens, and
    stop strings take one stream at a time. Raises TextError before the first token, for a prompt that encodes
    to nothing or has unknown symbols.
    """
    texts = [prompts] if isinstance(prompts, str) else list(prompts)
    stop = [stop] if isinstance(stop, str) else list(stop)
    sampler = sampler or Sampler()
    if max_tokens < 1:
        raise UserError(f"max_tokens is {max_tokens}; expected at least 1.")
    if "" in stop:
        raise UserError("a stop string is empty; give at least one character, or no stop string.")
    if seed < 0:
        raise UserError(f"seed is {seed}; expected 0 or more.")
    rows = [session.vocab.encode(text) for text in texts]
    for number, row in enumerate(rows):
        if len(row) == 0:
            raise TextError(
                f"prompt {number} ({texts[number]!r:.20}) encodes to no tokens; give at least one symbol."
            )
    if not rows:
        raise TextError("no prompt was given; give at least one.")
    if memory is not None and stop and len(rows) > 1:
        raise StreamError(
            "rows that continue existing memory must end together; give stop strings to one stream at a time."
        )
    decoders = [session.vocab.decoder() for _ in rows]
    for decoder, row in zip(decoders, rows, strict=True):  # so that a word after a prompt begins with a blank
        for token in row.tolist():
            decoder(token)
    tokens, streams = _aligned(session, rows, memory)
    keep = memory is not None
    return _generate(
        session,
        tokens,
        streams,
        max_tokens=max_tokens,
        sampler=sampler,
        seed=seed,
        stop=stop,
        keep=keep,
        decoders=decoders,
    )


def _aligned(session: Session, rows: list[np.ndarray], memory: Memory | None) -> tuple[np.ndarray, Memory]:
    """Rows padded on the left to one length, and their memory.

    The padding stands at negative positions, where it is invisible to what follows.
    """
    lengths = np.array([len(row) for row in rows])
    if memory is not None and memory.batch != len(rows):
        raise StreamError(
            f"{len(rows)} prompt(s) were given and the memory holds {memory.batch} streams; give one prompt "
            "for each stream."
        )
    begun = memory is not None and bool((memory.positions != 0).any())
    if begun and len(set(lengths.tolist())) > 1:
        raise StreamError(
            "prompts that continue existing memory must have equal numbers of tokens; feed them one by one."
        )
    padding = lengths.max() - lengths
    tokens = np.stack([np.pad(row, (pad, 0)) for row, pad in zip(rows, padding, strict=True)])
    memory = session.start(len(rows)) if memory is None else memory
    if not begun:
        memory.positions[:] = -padding
    return tokens, memory


def _generate(
    session: Session,
    tokens: np.ndarray,
    memory: Memory,
    *,
    max_tokens: int,
    sampler: Sampler,
    seed: int,
    stop: Sequence[str],
    keep: bool,
    decoders: Sequence[Decoder],
) -> Iterator[Piece]:
    for at in range(0, tokens.shape[1], session.rule.segment):
        logits, memory = session.predict(tokens[:, at : at + session.rule.segment], memory)
    draws = [np.random.default_rng([seed, row]) for row in range(len(tokens))]
    texts = [_Text(decoder, stop) for decoder in decoders]
    token = np.zeros((len(tokens), 1), np.int64)
    for count in range(1, max_tokens + 1):
        for row, text in enumerate(texts):
            if not text.ended:
                token[row] = sampler(logits[row], draws[row])
                yield Piece(
                    row=row,
                    token=int(token[row, 0]),
                    text=text.add(int(token[row, 0]), last=count == max_tokens),
                )
        finished = count == max_tokens or all(text.ended for text in texts)
        if keep or not finished:
            logits, memory = session.predict(token, memory)
        if finished:
            return


class _Text:
    """The text of one row as it grows. It releases what can no longer be part of a stop string."""

    def __init__(self, decoder: Decoder, stop: Sequence[str]) -> None:
        self._decode, self._stop = decoder, stop
        self._held = ""
        self.ended = False

    def add(self, token: int, *, last: bool) -> str:
        """The text that is released by one more token; all of it with the last one."""
        self._held += self._decode(token)
        found = [at for text in self._stop if (at := self._held.find(text)) >= 0]
        if found:
            self.ended = True
            return self._held[: min(found)]
        keep = 0 if last else self._overlap()
        released, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return released

    def _overlap(self) -> int:
        """The length of the longest end of the held text with which a stop string begins."""
        longest = max((len(text) for text in self._stop), default=1) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(text.startswith(self._held[-length:]) for text in self._stop):
                return length
        return 0

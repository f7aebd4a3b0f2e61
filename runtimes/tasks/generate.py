"""Generating text from prompts of any lengths. Every token costs the same, however long the text becomes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from runtimes.base.errors import StreamError, TextError, UserError
from runtimes.base.machine import refuse_beyond_memory
from runtimes.base.ranges import POSITIVE, Range, counted
from runtimes.contract.checks import checked_ids, checked_tokens
from runtimes.contract.memory import Memory
from runtimes.contract.promises import refuse_unpromised
from runtimes.contract.sampling import Sampler
from runtimes.contract.session import Session
from runtimes.contract.vocabulary import Decoder, Vocab, WholeTokens
from runtimes.contract.vocabulary.growing_text import GrowingText, Reason, border_of
from runtimes.tasks.sample import NOT_FINITE, Draw, Penalties, numbers, penalties_of

Prompt: TypeAlias = str | Sequence[int] | np.ndarray  # a text, or token ids


class Piece(NamedTuple):
    """One generated token of one row."""

    row: int
    token: int
    text: str
    """What the token adds to the text of its row. Text that may become a stop string is held back until
    that is decided.
    """
    ended: Reason | None = None
    """With the last token of a row, why the row ends: the token is the vocabulary's end of a document
    (`end`, which adds no text), a stop string was met (`stop`), or the row has all the tokens that were
    asked for (`length`). None before.
    """


def generate(
    session: Session,
    prompts: Prompt | Sequence[Prompt],
    *,
    max_tokens: int,
    sampler: Sampler | None = None,
    seed: int = 0,
    stop: str | Sequence[str] = (),
    memory: Memory | None = None,
    text: bool = True,
) -> Iterator[Piece]:
    """Yields a Piece per row and step until every row has `max_tokens` tokens or has ended before.

    sampler: how tokens are drawn; by default as the model recommends (`session.sampler`).
    `session.sampler.replaced(temperature=0.5)` changes a part of that.

    prompts: one text, one sequence of token ids, or a batch of either, of unequal lengths. Under the
    same-length mask the text of row r depends only on its prompt, the seed and r, and not on the other rows.
    A row ends with the vocabulary's token for the end of a document, if it has one. stop: strings that end a
    row too. A stop string and what follows it are not part of the text. In a vocabulary of ids it is one or
    several whole tokens, with blanks between them, and never a part of one. text: False leaves the text of
    all pieces empty, which needs no library that decodes them.

    memory: streams to continue. They are updated in place, and at the end each has seen the tokens that were
    yielded for it. Who stops earlier leaves the last of them to be fed. Where all rows of a session advance
    together (see `Session`), several streams need prompts of equal numbers of tokens and end together: stop
    strings are refused there, and the end of a document ends no row.

    Raises TextError before the first token, for a prompt that encodes to nothing or has unknown symbols.
    """
    listed = _batch(prompts)
    stop = [stop] if isinstance(stop, str) else list(stop)
    sampler = sampler or session.sampler
    POSITIVE.check("max_tokens", max_tokens)
    refuse_empty_stops(stop, session.vocab)
    Range(0, whole=True).check("seed", seed)
    names = ["the prompt"] if len(listed) == 1 else [f"prompt {number}" for number in range(len(listed))]
    rows = [encode_prompt(session.vocab, each, what=name) for each, name in zip(listed, names, strict=True)]
    if not rows:
        raise TextError("no prompt was given; give at least one.")
    if len(rows) > 1:
        longest = min(session.rule.segment, max(map(len, rows)))
        refuse_beyond_memory(
            len(rows) * session.step_bytes(segment=longest),
            what=f"a step of {len(rows)} prompts",
            fix="give fewer prompts at once",
        )
    several = memory is not None and len(rows) > 1
    together = several and session.spec is not None and session.spec.lengths_fault is not None
    if stop and together:
        raise StreamError(
            "rows that continue existing memory must end together in this form of memory; give stop strings "
            "to one stream at a time, or use an artefact with ring memory."
        )
    if stop and not text:
        raise UserError(
            "stop strings are searched in the text, which was not asked for; leave one of them out."
        )
    decoders = [session.vocab.decoder() if text else WholeTokens(lambda token: "") for _ in rows]
    for decoder, row in zip(decoders, rows, strict=True):  # so that a word after a prompt begins with a blank
        decoder.prime(row.tolist())
    tokens, lengths, starts = _aligned(rows, memory, together=together)
    return _generate(
        session,
        tokens,
        lengths,
        starts,
        session.start(len(rows)) if memory is None else memory,
        max_tokens=max_tokens,
        sampler=sampler,
        penalties=[penalties_of(sampler, session.vocab.size, row) for row in rows],
        seed=seed,
        stop=stop,
        keep=memory is not None,
        end=None if together else session.vocab.special.end_of_document,
        decoders=decoders,
    )


def refuse_empty_stops(stop: Sequence[str], vocab: Vocab) -> None:
    """Raises UserError for a stop string that would end every text."""
    # In a vocabulary of ids, blanks separate tokens and are no text of their own.
    if any(not (each.strip() if vocab.kind == "ids" else each) for each in stop):
        raise UserError("a stop string is empty; give at least one character, or leave it out.")


def encode_prompt(vocab: Vocab, prompt: Prompt, *, what: str) -> np.ndarray:
    """The token ids int64 [N] of a prompt; raises TextError if it has none, or ids that are not of this
    vocabulary.

    what: a name of the prompt, for messages.
    """
    if isinstance(prompt, bytes | bytearray):
        raise TextError(f"{what} is bytes; give a text, as bytes.decode makes it, or token ids.")
    first = vocab.special.before_text
    begin = "" if first is None else f", or the token ids [{first}] to start at the beginning of a text"
    if isinstance(prompt, str):
        ids = vocab.encode(prompt)
        if len(ids) == 0:
            raise TextError(f"{what} ({prompt!r:.20}) encodes to no tokens; give at least one symbol{begin}.")
        return ids
    ids = checked_ids(prompt, vocab.size, what=what)
    if len(ids) == 0:
        raise TextError(f"{what} has no token ids; give at least one{begin}.")
    return ids


def _batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """The prompts one by one; a sequence of integers is one of them."""
    single = isinstance(prompts, str | bytes | bytearray)
    if single or (isinstance(prompts, np.ndarray) and prompts.ndim == 1):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise TextError(f"the prompt is {prompts!r:.40}; expected a text, token ids, or a list of them.")
    listed: list[Any] = list(prompts)
    integers = bool(listed) and all(isinstance(item, int | np.integer) for item in listed)
    return [listed] if integers else listed


def _aligned(
    rows: list[np.ndarray], memory: Memory | None, *, together: bool
) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None]:
    """Rows padded to one length [B, N], how many of its tokens each row has, and where the rows start.

    At the start of a text the padding is on the left, at negative positions, and so invisible to what
    follows; then the starts are not None. In a stream that has begun it is on the right, and the lengths are
    not None.
    """
    lengths = np.array([len(row) for row in rows])
    if memory is not None and memory.batch != len(rows):
        raise StreamError(
            f"{counted(len(rows), 'prompt')} for a memory of {counted(memory.batch, 'stream')}; give one "
            "prompt for each stream."
        )
    padding = lengths.max() - lengths
    if memory is not None and (memory.positions != 0).any() and padding.any():
        if together:
            raise StreamError(
                "prompts that continue existing memory must have equal numbers of tokens in this form of "
                "memory; feed them one by one, or use an artefact with ring memory."
            )
        tokens = np.stack([np.pad(row, (0, pad)) for row, pad in zip(rows, padding, strict=True)])
        return tokens, lengths, None
    tokens = np.stack([np.pad(row, (pad, 0)) for row, pad in zip(rows, padding, strict=True)])
    return tokens, None, -padding if padding.any() else None


def _generate(
    session: Session,
    tokens: np.ndarray,
    lengths: np.ndarray | None,
    starts: np.ndarray | None,
    memory: Memory,
    *,
    max_tokens: int,
    sampler: Sampler,
    penalties: Sequence[Penalties | None],
    seed: int,
    stop: Sequence[str],
    keep: bool,
    end: int | None,
    decoders: Sequence[Decoder],
) -> Iterator[Piece]:
    if starts is not None:
        if keep:  # a memory that does not fit is refused before anything in it changes
            checked_tokens(session, tokens[:, :1], memory)
        if session.spec is not None:
            refuse_unpromised(session.spec.without, starts, session.rule.segment)
        memory.positions[:] = starts
    logits = feed(session, tokens, memory, lengths)
    uniform = [numbers(seed, row) for row in range(len(tokens))]
    border = border_of(session.vocab)
    texts = [GrowingText(decoder, stop, border) for decoder in decoders]
    token = np.zeros((len(tokens), 1), np.int64)
    going: list[int] = []  # the rows that have not ended
    places: slice | list[int]
    rows = list(range(len(tokens)))
    for count in range(1, max_tokens + 1):
        if rows != going:
            going = rows
            everyone = len(going) == len(texts)
            places = slice(None) if everyone else going
            draw = Draw([sampler] * len(going), session.vocab.size, [penalties[row] for row in going])
            counts = None if everyone or not keep else np.isin(range(len(texts)), going).astype(np.int64)
        chances = () if draw.greedy else [next(uniform[row]) for row in going]
        drawn = draw.tokens(logits if everyone else logits[going], chances)
        if -1 in drawn:
            raise UserError(NOT_FINITE)
        token[places, 0] = drawn
        last = count == max_tokens
        for row, new in zip(going, drawn, strict=True):
            text = texts[row]
            added = text.finish() if new == end else text.add(new, last=last)
            yield Piece(row, new, added, text.ended)
        rows = [row for row in going if texts[row].ended is None]
        if keep or rows:  # rows that ended before see nothing more, if their memory is kept
            logits, _ = session.predict(token, memory, lengths=counts)
        if not rows:
            return


def feed(
    session: Session, tokens: np.ndarray, memory: Memory, lengths: np.ndarray | None = None
) -> np.ndarray:
    """Logits [B, V] after the last token of each row of tokens [B, N], fed in segments.

    lengths: how many tokens each row has; the others are padding. A row without any has NaN.
    """
    if lengths is None or (lengths == tokens.shape[1]).all():
        # A large vocabulary's logits are computed only if they are asked for.
        selective = session.spec is not None and session.spec.model.selective
        for at in range(0, tokens.shape[1], session.rule.segment):
            piece = tokens[:, at : at + session.rule.segment]
            if selective and at + session.rule.segment < tokens.shape[1]:
                session.score(piece, np.full_like(piece, -1), memory)
            else:
                logits, _ = session.predict(piece, memory)
        return logits
    logits = np.full((len(tokens), session.vocab.size), np.nan, np.float32)
    for at in range(0, tokens.shape[1], session.rule.segment):
        piece = tokens[:, at : at + session.rule.segment]
        counts = np.clip(lengths - at, 0, piece.shape[1])
        found, _ = session.predict(piece, memory, lengths=counts)
        logits[counts > 0] = found[counts > 0]
    return logits

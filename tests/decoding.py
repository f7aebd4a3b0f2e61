"""Token ids on which decoders differ: of texts, cut anywhere, mixed, repeated, and any ids."""

from __future__ import annotations

import random
from collections.abc import Sequence

from runtimes.contract.vocabulary import Vocab, token_texts


def random_ids(vocab: Vocab, texts: Sequence[str], count: int, seed: int = 0) -> list[list[int]]:
    """Lists of ids, the same in every run. texts: that the vocabulary can encode."""
    draw = random.Random(seed)
    encoded = [ids for text in texts if (ids := vocab.encode(text).tolist())] or [[0]]

    def some() -> list[int]:
        """A few neighbours, which may begin or end inside of a character."""
        ids = draw.choice(encoded)
        at = draw.randrange(len(ids))
        return ids[at : at + draw.randrange(1, 5)]

    def one() -> list[int]:
        kind = draw.randrange(6)
        if kind == 0:
            return draw.choice(encoded)
        if kind == 1:
            return draw.choice(encoded)[: draw.randrange(1, 12)]
        if kind == 2:
            return [token for _ in range(draw.randrange(1, 8)) for token in some()]
        if kind == 3:
            return some()[:1] * draw.randrange(1, 20)
        highest = vocab.size if kind == 4 else min(vocab.size, 12)  # special tokens have small ids
        return [draw.randrange(highest) for _ in range(draw.randrange(1, 14))]

    return [one() for _ in range(count)]


def pieces_and_rest(vocab: Vocab, ids: Sequence[int]) -> list[str]:
    """What each token adds to the text, and at the end what would follow if it ended there."""
    decoder = vocab.decoder()
    found = [*map(decoder, ids), decoder.rest()]
    assert "".join(found) == "".join(token_texts(vocab, ids))
    return found

"""The texts of single tokens, which are looked up and not decoded again for every place."""

from __future__ import annotations

from collections.abc import Hashable

from runtimes.contract.vocabulary import Vocab

MOST = 1 << 17  # texts that are kept
PROBES = 8  # tokens whose texts tell what kind of token came before them


class TokenTexts:
    """What a token adds to a text that ends with another token.

    A decoder has to be made for each question, because it keeps what came before. So answers are kept. In a
    vocabulary of subwords, whose tokens are many and slow to decode, tokens after which some others read the
    same are taken for one.
    """

    def __init__(self, vocab: Vocab) -> None:
        self.vocab = vocab
        step = max(1, vocab.size // PROBES)
        self._probes = range(step // 2, vocab.size, step) if vocab.kind == "subword" else None
        self._kinds: dict[int | None, Hashable] = {}
        self._texts: dict[tuple[int, Hashable], str] = {}

    def after(self, last: int | None, token: int) -> str:
        """The text that `token` adds after `last`; None is the beginning of a text."""
        kind = self._kinds.get(last)
        if kind is None:
            kind = self._kinds[last] = self._kind(last)
        text = self._texts.get((token, kind))
        if text is None:
            if len(self._texts) >= MOST:
                self._texts.clear()
            text = self._texts[token, kind] = self._decoded(last, token)
        return text

    def _kind(self, last: int | None) -> Hashable:
        """What all tokens have in common after which other tokens add the same text."""
        if self._probes is None or last is None or not self.vocab.decoder()(last):
            return (last,)  # also a token that is the beginning of a character
        return tuple(self._decoded(last, probe) for probe in self._probes)

    def _decoded(self, last: int | None, token: int) -> str:
        decode = self.vocab.decoder()
        if last is not None:
            decode(last)
        return decode(token)

"""The text of one stream as it grows token by token, up to a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from runtimes.contract.vocabulary.base import Decoder, Vocab

Reason = Literal["end", "stop", "length"]


class GrowingText:
    """The text of one stream as it grows. It releases what can no longer be part of a stop string.

    decoder: of the stream; it has decoded the tokens before the text. stop: strings that are not empty.
    border: the text around each token, and so around a stop string (see `border_of`). goes_on: whether a
    later text continues this one, so that half a character at its end waits for the other half.
    """

    def __init__(self, decoder: Decoder, stop: Sequence[str], border: str, *, goes_on: bool = False) -> None:
        self._decode = decoder
        self._border = border
        self._goes_on = goes_on
        self._stop = [border + (text.strip() if border else text) + border for text in stop]
        self._held = ""
        self.ended: Reason | None = None
        """Why the text has ended; None while it grows."""
        self.plain = None if stop else decoder
        """The decoder, if nothing is ever held back. It may be called instead of `add` for any token but the
        last.
        """

    def finish(self) -> str:
        """The text that was held back, released by the end of the document."""
        self.ended = "end"
        return self._held + self._decode.rest()

    def add(self, token: int, *, last: bool) -> str:
        """The text that is released by one more token; all of it with the last one."""
        if last:
            self.ended = "length"
        elif self.plain is not None:
            return self._decode(token)
        self._held += self._decode(token)
        if self._stop:
            # A stop string ends the text as soon as it is there, even if a later token could change it.
            text = self._held + self._decode.rest()
            whole = text + self._border
            found = [at for stop in self._stop if (at := whole.find(stop)) >= 0]
            if found:
                self.ended = "stop"
                return text[: min(found)]
        if last:
            return self.held
        keep = self._overlap()
        released = self._held[: len(self._held) - keep]
        self._held = self._held[len(self._held) - keep :]
        return released

    @property
    def held(self) -> str:
        """The text that is held back, to be released if the text ends here."""
        return self._held + self._decode.rest(half=not self._goes_on)

    def _overlap(self) -> int:
        """The length of the longest end of the held text with which a stop string begins."""
        whole = self._held + self._border
        end = len(self._border)
        longest = max((len(text) for text in self._stop), default=1) - 1
        for length in range(min(longest, len(whole)), end, -1):
            if any(text.startswith(whole[-length:]) for text in self._stop):
                return length - end
        return 0


def border_of(vocab: Vocab) -> str:
    """The text around each token of a text; empty if a stop string may be a part of a token."""
    return " " if vocab.kind == "ids" else ""

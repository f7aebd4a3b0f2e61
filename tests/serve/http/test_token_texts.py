"""The table of token texts says what decoding says, and decodes once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from runtimes.contract.vocabulary import Vocab, vocab_from_file
from runtimes.contract.vocabulary.ids import IdsVocab
from runtimes.contract.vocabulary.symbols import ByteVocab
from tests.runtimes.contract.test_subword import trained
from xl_export.serve.http.base.encoding import TokenTexts


@pytest.mark.parametrize("kind", ["byte", "ids", "byte-level", "wordpiece", "sentencepiece"])
def test_texts_are_those_of_a_decoder(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = {"byte": ByteVocab, "ids": lambda: IdsVocab(9)}
    vocab: Vocab = own[kind]() if kind in own else vocab_from_file(trained(kind, tmp_path))

    def decoded(last: int | None, token: int) -> str:
        decode = vocab.decoder()
        if last is not None:
            decode(last)
        return decode(token)

    pairs = [(None, 0), *np.random.default_rng(0).integers(0, vocab.size, (500, 2)).tolist()]
    expected = [decoded(last, token) for last, token in pairs]
    texts = TokenTexts(vocab)
    assert [texts.after(last, token) for last, token in pairs] == expected
    monkeypatch.setattr(vocab, "decoder", None)
    assert [texts.after(last, token) for last, token in pairs] == expected, "nothing is decoded twice"

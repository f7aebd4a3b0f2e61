"""Learns a vocabulary of subwords from texts, with the libraries that will use it.

The same texts give the same bytes, on every machine with the same releases of the libraries. Two of their
trainers do not promise that, and are given what they need for it (see `_unigram` and `_wordpiece`).
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

from runtimes.base.errors import ConfigError, UserError, first_line, needs, of_library
from runtimes.base.records import json_text
from runtimes.contract.vocabulary import SubwordVocab

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SubwordKind = Literal["bpe", "unigram", "wordpiece", "byte-bpe", "sentencepiece"]
VocabChoice = SubwordKind | Literal["word"]
UNKNOWN, BEGINNING, END, PADDING = SPECIAL = ("<unk>", "<s>", "</s>", "<pad>")  # the ids 0 to 3
SUBWORDS = 4096  # tokens of a vocabulary whose size was not given
LONGEST_SENTENCE = 1 << 14  # bytes; SentencePiece leaves out longer lines
Texts = Callable[[], Iterable[str]]  # the texts from their beginning, whenever it is called


def learn_subwords(kind: SubwordKind, size: int, texts: Texts) -> SubwordVocab:
    """A vocabulary of at most `size` subwords, special tokens included, of the texts in pieces of whole
    lines.

    All kinds but `wordpiece` give back a text as it was, white space included. Raises ConfigError if the
    library cannot make a vocabulary of this size.
    """
    make: dict[SubwordKind, Callable[[int, Texts], bytes]] = {
        "bpe": _bpe,
        "byte-bpe": _byte_bpe,
        "wordpiece": _wordpiece,
        "unigram": _unigram,
        "sentencepiece": _sentencepiece,
    }
    with needs("subword", "tokenizers", "sentencepiece"), _refused(kind, size):
        content = make[kind](size, texts)
    vocab = SubwordVocab("sentencepiece" if kind == "sentencepiece" else "tokenizers", content)
    if vocab.size > size:
        raise ConfigError(
            f"a vocabulary of {size} tokens was asked for, and the text needs {vocab.size:,} for its single "
            f"symbols and the special tokens; give at least that, or at least {256 + len(SPECIAL)} tokens of "
            "the kind byte-bpe."
        )
    return vocab


def _bpe(size: int, texts: Texts) -> bytes:
    from tokenizers import Tokenizer, models, trainers

    tokenizer = _with_spaces(Tokenizer(models.BPE(unk_token=UNKNOWN)))
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=[*SPECIAL], show_progress=False)
    tokenizer.train_from_iterator(texts(), trainer)
    return _content(tokenizer)


def _byte_bpe(size: int, texts: Texts) -> bytes:
    """Every byte is a token, so no text is unknown."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=[*SPECIAL], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts(), trainer)
    return _content(tokenizer)


def _wordpiece(size: int, texts: Texts) -> bytes:
    """The trainer numbers the characters inside words in an order of chance, and breaks ties by these
    numbers.

    Here they are special tokens while it learns, which have the first numbers in the order given.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    alphabet: set[str] = set()
    for text in texts():
        alphabet.update(text)
    inside = [f"##{symbol}" for symbol in sorted(alphabet) if not symbol.isspace()]
    tokenizer = Tokenizer(models.WordPiece(unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=size, special_tokens=[*SPECIAL, *inside], show_progress=False
    )
    tokenizer.train_from_iterator(texts(), trainer)
    data = json.loads(tokenizer.to_str())
    data["added_tokens"] = [token for token in data["added_tokens"] if token["content"] in SPECIAL]
    return _content(Tokenizer.from_str(json_text(data)))


def _unigram(size: int, texts: Texts) -> bytes:
    """Learned by SentencePiece and written for `tokenizers`, whose own trainer sums in an order of chance.

    Special tokens are pieces, too. A text never becomes one, because its `<` is split off in front of `/s>`.
    """
    from sentencepiece import SentencePieceProcessor
    from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers

    trained = SentencePieceProcessor(model_proto=_learned(size, texts, byte_fallback=False))
    scored = [(trained.id_to_piece(i), trained.get_score(i)) for i in range(trained.get_piece_size())]
    tokenizer = _with_spaces(Tokenizer(models.Unigram(scored, unk_id=0, byte_fallback=False)))
    names = "|".join(token.removeprefix("<") for token in SPECIAL)
    begins = pre_tokenizers.Split(Regex(f"<(?={names})"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([begins, tokenizer.pre_tokenizer])
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return _content(tokenizer)


def _sentencepiece(size: int, texts: Texts) -> bytes:
    """What is not in the alphabet is spelled in bytes, so no text is unknown."""
    return _learned(size, texts, byte_fallback=True)


def _learned(size: int, texts: Texts, *, byte_fallback: bool) -> bytes:
    from sentencepiece import SentencePieceTrainer

    written = io.BytesIO()
    of_texts: list[BaseException] = []  # SentencePiece makes a RuntimeError of any

    def parts() -> Iterator[str]:
        try:
            yield from (part for text in texts() for line in text.split("\n") for part in cut_line(line))
        except (Exception, KeyboardInterrupt, SystemExit) as error:
            of_texts.append(error)
            raise

    try:
        SentencePieceTrainer.train(
            sentence_iterator=parts(),
            model_writer=written,
            vocab_size=size,
            unk_id=0,
            bos_id=1,
            eos_id=2,
            pad_id=3,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            byte_fallback=byte_fallback,
            user_defined_symbols=["\n"],
            character_coverage=1.0,
            max_sentence_length=LONGEST_SENTENCE,
            num_threads=1,  # sums of several threads differ from one time to the next
            minloglevel=2,
        )
    except RuntimeError:
        if of_texts:
            raise of_texts[0] from None
        raise
    return written.getvalue()


def cut_line(line: str) -> Iterator[str]:
    """The parts of a line that SentencePiece does not leave out: a long one is cut in front of blanks, or
    anywhere where there is none.
    """
    at = 0
    most = LONGEST_SENTENCE // 4  # characters, of at most 4 bytes
    if len(line.encode("utf-8")) > LONGEST_SENTENCE:
        while len(line) - at > most:
            end = line.rfind(" ", at + 1, at + most)
            end = end if end > 0 else at + most
            yield line[at:end]
            at = end
    if line:
        yield line[at:]


def _with_spaces(tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer, with blanks as part of the words after them and each newline as a token."""
    from tokenizers import decoders, pre_tokenizers

    lines = pre_tokenizers.Split("\n", "isolated")
    words = pre_tokenizers.Metaspace(prepend_scheme="never")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([lines, words])
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="never")
    return tokenizer


def _content(tokenizer: Tokenizer) -> bytes:
    text: str = tokenizer.to_str(pretty=True)
    return (text + "\n").encode("utf-8")


@contextmanager
def _refused(kind: SubwordKind, size: int) -> Iterator[None]:
    """Raises ConfigError if a library fails; `tokenizers` may panic, which is no subclass of Exception."""
    try:
        yield
    except (UserError, ImportError, OSError):
        raise
    except BaseException as error:
        if not of_library(error):
            raise
        reason = (first_line(error).rpartition("] ")[2] or first_line(error)).partition(". Increase")[0]
        raise ConfigError(
            f"no vocabulary of the kind {kind} and the size {size} could be made ({reason:.200}); give "
            "another --size, or more text."
        ) from error

"""Artefacts for the tests of web/, and what Python computes with them."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from runtimes.base.errors import TextError
from runtimes.contract.memory import save_memory
from runtimes.contract.sampling import Sampler
from runtimes.contract.session import Session
from runtimes.contract.vocabulary import ByteVocab, CharVocab, IdsVocab, Vocab, WordVocab, save_vocab
from runtimes.contract.vocabulary.subword import SubwordVocab, pieces
from runtimes.sessions.onnx_runtime import OrtSession
from runtimes.tasks.generate import generate
from tests.architectures import ARCHITECTURES, SMALLEST, UNSEEN
from tests.decoding import pieces_and_rest, random_ids
from trainer.data.subwords import learn_subwords
from xl_export.artefact.export import export

GREEDY, DRAWN = 50, 40  # tokens
DRAW: dict[str, Any] = {"temperature": 0.9, "top_k": 9, "top_p": 0.95, "presence_penalty": 0.4, "seed": 5}
LINES = "the cat sat on the mat\nthe dog sat on the log, the cat — naïve 🙂 — ran\n" * 40
# What random texts are made of: letters of several scripts, blanks that languages disagree on, marks, emoji.
ALPHABETS = (
    "abcdefghij the quick brown",
    "ABCXYZ 0123456789",
    " \n\t\r\f\v\x1c\x1d\x85\xa0\u2003\u3000",
    "éüñßİıſŁ漢字かなカナعربيעברית",
    "🙂👩‍👩‍👧🇩🇪",
    "\u0301\u0300\u200d\ufe0f\ufeff\ufffd",
    ",.!?;:-_()[]{}<>|#@'ａｂｃ①②",
)
WORDS = ("the ", "cat ", "sat on", " the log", ", ran\n", "'ll", "  ", "naïve", "<|endoftext|>", "</s>")


def random_texts(count: int, seed: int = 0) -> list[str]:
    """Texts of any Unicode characters, the same in every run."""
    draw = random.Random(seed)

    def part() -> str:
        return draw.choice(draw.choice(ALPHABETS)) if draw.random() < 0.7 else draw.choice(WORDS)

    return ["".join(part() for _ in range(draw.randrange(40))) for _ in range(count)]


def byte_level(*, size: int = 300, prefix: bool = False) -> Tokenizer:
    """A byte-level BPE, as GPT-2 has one."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    return _trained(tokenizer, decoders.ByteLevel(), size)


def split_by_pattern() -> Tokenizer:
    """A byte-level BPE over a pattern, as newer models have one, with Unicode's normal form."""
    tokenizer = Tokenizer(models.BPE())
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+"
    )
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.NFC(), pre_tokenizers.Sequence([split, level])
    return _trained(tokenizer, decoders.ByteLevel(), 300)


def byte_fallback() -> Tokenizer:
    """A BPE with bytes for what it lacks, as SentencePiece models have it when they are converted."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=names, show_progress=False)
    tokenizer.train_from_iterator([LINES], trainer)
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    names = ["<unk>", "<s>", "</s>"]
    trainer = trainers.UnigramTrainer(
        vocab_size=100, special_tokens=names, unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator([LINES], trainer)
    return tokenizer


def added_tokens() -> Tokenizer:
    """A byte-level BPE with added tokens: of the characters that stand for bytes, and of others."""
    tokenizer = byte_level()
    tokenizer.add_tokens(["Ġadded", "é", "漢字"])
    return tokenizer


def characters() -> Tokenizer:
    """A BPE over characters that keeps each blank, as `xl-export data --tokenizer bpe` learns one."""
    learned = learn_subwords("bpe", 120, lambda: iter([LINES]))
    return Tokenizer.from_str(learned.files["tokenizer.json"].decode())


def _trained(tokenizer: Tokenizer, decoder: Any, size: int) -> Tokenizer:
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([LINES], trainer)
    tokenizer.decoder = decoder
    return tokenizer


def subwords(tokenizer: Tokenizer, more: int = 0) -> SubwordVocab:
    """The vocabulary of a model that has some tokens more than its library."""
    content = tokenizer.to_str().encode()
    return SubwordVocab("tokenizers", content, size=tokenizer.get_vocab_size() + more)


def vocabularies(text: str) -> dict[str, Vocab]:
    """One of every kind and option."""
    symbols = ["<unk>", "<eos>", "<s>", "the", "cat", "naïve", "i̇", ",", "🙂"]
    return {
        "byte": ByteVocab(),
        "byte-values": ByteVocab([*range(32, 127), 10, 195, 169], skipped=[13, 9]),
        "char": CharVocab.build(text + "🙂\u0301"),
        "word": WordVocab(symbols, lower_case=True),
        "word-lines": WordVocab(symbols, start_of_line="<s>"),
        "word-no-lines": WordVocab(symbols[3:], end_of_line=None, unknown="none"),
        "ids": IdsVocab(9),
        "ids-names": IdsVocab(9, names=symbols),
        "byte-level": subwords(byte_level()),
        "byte-level-prefix": subwords(byte_level(prefix=True)),
        "byte-level-added": subwords(added_tokens()),
        "pattern": subwords(split_by_pattern()),
        "byte-fallback": subwords(byte_fallback(), more=2),
        "characters": subwords(characters()),
        "unigram": subwords(unigram()),
    }


def vocabulary_case(name: str, vocab: Vocab, folder: Path, *, count: int = 150) -> dict[str, Any]:
    """Texts with Python's ids (null for a text that is refused), and ids with Python's pieces of text.

    The last piece would follow if the text ended there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    save_vocab(folder, vocab)
    texts: list[dict[str, Any]] = []
    decoded: list[dict[str, Any]] = []
    for text in [*random_texts(count), "the cat naïve 🙂", "THE CAT\n\nthe\n", "a\0b", ""]:
        try:
            ids = vocab.encode(text.encode()).tolist()
        except TextError:
            ids = None
        texts.append({"text": text, "ids": ids})
    encodable = [case["text"] for case in texts if case["ids"] is not None]
    for ids in random_ids(vocab, encodable, 2 * count):
        decoded.append({"ids": ids, "pieces": pieces_and_rest(vocab, ids)})
    return {"name": name, "folder": str(folder), "texts": texts, "decoded": decoded}


def long_text() -> list[str]:
    """A text that is longer than what a library of subwords encodes at a time, and its pieces."""
    text = "".join(random_texts(9000, seed=3)) + "🙂" * 300_000
    return [text, *pieces(text)]


def model_case(name: str, folder: Path, scratch: Path) -> dict[str, Any]:
    """What Python computes with an artefact: tokens, texts, scores, and a saved stream with what follows."""
    session = OrtSession.open(folder, threads=1, kernel="standard")
    draw = np.random.default_rng(7)
    prompt, scored, following = (
        draw.integers(0, session.vocab.size, count) for count in (21, 3 * session.rule.segment + 5, 3)
    )
    greedy = list(generate(session, prompt, max_tokens=GREEDY, sampler=Sampler(temperature=0)))
    sampler = Sampler(**{option: value for option, value in DRAW.items() if option != "seed"})
    drawn = list(generate(session, prompt, max_tokens=DRAWN, sampler=sampler, seed=DRAW["seed"]))
    memory = session.start(1)
    feed(session, prompt, memory)
    save_memory(memory, scratch / f"{name}.stream")
    logits, _ = session.predict(following[None], memory)
    return {
        "name": name,
        "folder": str(folder),
        "tolerance": session.spec.tolerance,
        "prompt": prompt.tolist(),
        "greedy": [piece.token for piece in greedy],
        "pieces": [piece.text for piece in greedy],
        "draw": {
            "temperature": DRAW["temperature"],
            "topK": DRAW["top_k"],
            "topP": DRAW["top_p"],
            "presencePenalty": DRAW["presence_penalty"],
            "seed": DRAW["seed"],
        },
        "drawn": [piece.token for piece in drawn],
        "scored": scored.tolist(),
        "nats": scores(session, scored).tolist(),
        "stream": str(scratch / f"{name}.stream"),
        "next": following.tolist(),
        "logits": logits[0].tolist(),
    }


def feed(session: Session, tokens: np.ndarray, memory: Any) -> None:
    for at in range(0, len(tokens), session.rule.segment):
        session.predict(tokens[None, at : at + session.rule.segment], memory)


def scores(session: Session, tokens: np.ndarray) -> np.ndarray:
    """The surprisal in nats of every token but the first."""
    memory, found = session.start(1), []
    for at in range(0, len(tokens) - 1, session.rule.segment):
        end = min(at + session.rule.segment, len(tokens) - 1)
        log_probs, memory = session.score(tokens[None, at:end], tokens[None, at + 1 : end + 1], memory)
        found.append(-log_probs[0])
    return np.concatenate(found)


def artefacts_of_kinds(make_run: Callable[..., Path], folder: Path) -> dict[str, Path]:
    """Artefacts with other vocabularies than characters, and with what models may have besides."""
    words = WordVocab(["<unk>", "<eos>", *(f"w{number}" for number in range(78))])
    kinds: dict[str, tuple[str, Vocab, dict[str, Any]]] = {
        "word-adaptive": ("shift", words, ARCHITECTURES["adaptive-softmax"]),
        "byte-spans": ("ring", ByteVocab(), ARCHITECTURES["all-attention-groups"]),
        "subword-zeros": ("ring", subwords(byte_level()), {"rule": UNSEEN}),
        "empty-weights": ("ring", IdsVocab(SMALLEST["vocab_size"]), SMALLEST),
    }
    made = {}
    for name, (form, vocab, sizes) in kinds.items():
        run = make_run(**{**sizes, "vocab_size": vocab.size})
        save_vocab(run, vocab)
        made[name] = export(run, folder / name, memory=form)  # type: ignore[arg-type]
    made["in-bytes"] = export(make_run(), folder / "in-bytes", memory_precision="int8")
    return made

"""A ring artefact loads in onnxruntime-genai as it is."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtimes import Sampler, generate, open_session
from runtimes.contract.sampling import write_sampling
from runtimes.contract.vocabulary import ByteVocab, CharVocab, IdsVocab, SubwordVocab, Vocab, WordVocab
from tests.commands import xl
from trainer.data.subwords import learn_subwords
from xl_export.graph.genai import _tokenizer_files

og = pytest.importorskip("onnxruntime_genai", reason="onnxruntime-genai has no package for this platform")
SMALL = Path(__file__).parents[2] / "data" / "small"  # written by an earlier release
PROMPT, LENGTH = "The function of the file", 60
TEXTS = ("The  quick\n\nbrown fox", " ", "\n", "  two  spaces  ", "I'm 1234 isn't...!?")


def greedy(artefact: Path, prompt: str) -> list[int]:
    pieces = generate(open_session(artefact), prompt, max_tokens=LENGTH, sampler=Sampler(temperature=0))
    return [piece.token for piece in pieces]


def greedy_generator(artefact: Path) -> Any:
    params = og.GeneratorParams(model := og.Model(str(artefact)))
    params.set_search_options(do_sample=False)
    return og.Generator(model, params)


def test_genai_generates_the_same_tokens_beyond_the_ring(artefacts: dict[str, Path]) -> None:
    session = open_session(artefacts["ring"])
    assert 2 * session.rule.slots < LENGTH
    generator = greedy_generator(artefacts["ring"])
    assert len(PROMPT) > session.rule.segment  # cut by genai into pieces that the ring has room for
    generator.append_tokens(session.vocab.encode(PROMPT).astype(np.int32))
    found = []
    while len(found) < LENGTH:
        generator.generate_next_token()
        found.append(int(generator.get_next_tokens()[0]))
    assert found == greedy(artefacts["ring"], PROMPT)


@pytest.mark.parametrize(
    ("sampler", "likeliest"),
    [
        (Sampler(), False),
        (Sampler(temperature=1e6, top_k=5, top_p=0.9, repetition_penalty=1.1, min_p=0.1), False),
        (Sampler(top_k=1 << 40), False),
        (Sampler(temperature=0, top_k=7), True),
        (Sampler(temperature=5e-324), True),
        (Sampler(top_p=5e-324), True),
        (Sampler(top_p=5e-324, top_k=7), True),
    ],
    ids=str,
)
def test_genai_draws_as_set_says(
    sampler: Sampler, likeliest: bool, artefacts: dict[str, Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(artefacts["ring"], tmp_path / "artefact")
    identity = open_session(folder).identity
    write_sampling(folder, sampler)
    assert open_session(folder).identity == identity
    search = json.loads((folder / "genai_config.json").read_text())["search"]
    assert search["do_sample"] == (sampler.temperature > 1e-300)
    if sampler.min_p:
        named = {name: search[name] for name in ("temperature", "top_k", "top_p", "repetition_penalty")}
        assert named == {"temperature": 1e6, "top_k": 5, "top_p": 0.9, "repetition_penalty": 1.1}
    generator = og.Generator(model := og.Model(str(folder)), og.GeneratorParams(model))
    generator.append_tokens(open_session(folder).vocab.encode(PROMPT).astype(np.int32))
    found = []
    while len(found) < LENGTH:
        generator.generate_next_token()
        found.append(int(generator.get_next_tokens()[0]))
    assert (found == greedy(folder, PROMPT)) == likeliest


def test_a_sealed_configuration_keeps_its_settings(tmp_path: Path) -> None:
    """Artefacts of earlier releases have its hash in spec.json."""
    folder = shutil.copytree(SMALL, tmp_path / "artefact")
    before = (folder / "genai_config.json").read_bytes()
    assert "genai_config.json keeps its settings" in xl("set", folder, "--top-k", "3").stdout
    assert (folder / "genai_config.json").read_bytes() == before
    assert open_session(folder).sampler == Sampler(top_k=3)


def test_genai_runs_a_batch(artefacts: dict[str, Path]) -> None:
    session = open_session(artefacts["ring"])
    prompts = ["The func", "a statem"]  # genai takes the prompts of a batch in one piece
    params = og.GeneratorParams(model := og.Model(str(artefacts["ring"])))
    params.set_search_options(batch_size=2, do_sample=False)
    rows = np.stack([session.vocab.encode(prompt) for prompt in prompts]).astype(np.int32)
    with pytest.raises(RuntimeError, match="batch_size must be 1"):  # it would cut across the rows
        og.Generator(model, params).append_tokens(rows)
    params.set_search_options(batch_size=2, chunk_size=0)
    generator = og.Generator(model, params)
    generator.append_tokens(rows)
    found = []
    while len(found) < LENGTH:
        generator.generate_next_token()
        found.append([int(token) for token in generator.get_next_tokens()])
    assert [list(row) for row in zip(*found, strict=True)] == [
        greedy(artefacts["ring"], prompt) for prompt in prompts
    ]


def assert_same_tokens(folder: Path, texts: tuple[str, ...]) -> None:
    """genai's tokenizer gives the ids of the artefact's vocabulary, and back its text, also as a stream."""
    vocab, tokenizer = open_session(folder).vocab, og.Tokenizer(og.Model(str(folder)))
    for text in texts:
        ids = vocab.encode(text).tolist()
        stream = tokenizer.create_stream()
        assert [int(token) for token in tokenizer.encode(text)] == ids
        assert tokenizer.decode(ids) == text
        assert "".join(stream.decode(token) for token in ids) == text


def test_genai_reads_subwords_and_ends_with_a_document(chain: Callable[..., Any]) -> None:
    folder = chain("subword").artefact
    assert_same_tokens(folder, (*TEXTS, "caf\u00e9 \U0001f600 \u65e5\u672c"))
    vocab = open_session(folder).vocab
    config = json.loads((folder / "genai_config.json").read_text())["model"]
    assert config["eos_token_id"] == [vocab.special.end_of_document]
    assert (config["bos_token_id"], config["pad_token_id"]) == (
        vocab.special.beginning,
        vocab.special.padding,
    )
    tokenizer, prompt = og.Tokenizer(og.Model(str(folder))), "The name of the file " * 5
    generator = greedy_generator(folder)
    generator.append_tokens(tokenizer.encode(prompt))
    found: list[int] = []
    while len(found) < LENGTH and not generator.is_done():
        generator.generate_next_token()
        found.append(int(generator.get_next_tokens()[0]))
    expected = greedy(folder, prompt)
    assert found[: len(expected)] == expected
    assert len(found) - len(expected) == (len(found) < LENGTH)  # the end itself is not generated text


def test_genai_has_the_tokens_of_characters(artefacts: dict[str, Path]) -> None:
    assert_same_tokens(artefacts["ring"], TEXTS)


def test_bytes_and_long_characters_are_byte_level_tokens(artefacts: dict[str, Path], tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    symbols = ["\n", " ", "a", "b", "\u00e9", "\u00ea", "\u65e5", "\u672c", "\U0001f600"]
    text = "a b\n\u00e9\u00ea \u65e5\u672c\u65e5 \U0001f600a"
    for vocab, sample in ((CharVocab(symbols), text), (ByteVocab(), text + "xyz")):
        files = _tokenizer_files(vocab)
        own = Tokenizer.from_str(json.dumps(files["tokenizer.json"]))
        assert own.encode(sample).ids == vocab.encode(sample).tolist()
        shutil.copytree(artefacts["ring"], folder := tmp_path / vocab.kind)
        for name, document in files.items():
            (folder / name).write_text(json.dumps(document))
        tokenizer = og.Tokenizer(og.Model(str(folder)))
        assert [int(token) for token in tokenizer.encode(sample)] == vocab.encode(sample).tolist()
    unknown = Tokenizer.from_str(json.dumps(_tokenizer_files(CharVocab(symbols))["tokenizer.json"]))
    assert min(unknown.encode("c\u00eb").ids[1:]) >= len(symbols) or unknown.encode("c").ids[0] >= len(
        symbols
    )
    assert min(unknown.encode("c").ids) >= len(symbols)


@pytest.mark.parametrize(
    "vocab", [WordVocab(["<unk>", "<eos>", "a"]), IdsVocab(9), ByteVocab(range(256), skipped=[10])]
)
def test_a_vocabulary_that_genai_lacks_has_no_tokenizer_there(vocab: Vocab) -> None:
    assert _tokenizer_files(vocab) == {}


def test_only_byte_level_subwords_have_a_tokenizer_there() -> None:
    for kind in ("bpe", "unigram", "sentencepiece"):
        size = {"bpe": 40, "unigram": 16}.get(kind, 272)
        learnt = learn_subwords(kind, size, lambda: iter(["the cat sat on the mat\n"]))  # type: ignore[arg-type]
        assert _tokenizer_files(learnt) == {}


@pytest.fixture(scope="module")
def byte_level() -> SubwordVocab:
    return learn_subwords("byte-bpe", 270, lambda: iter(["the cat sat on the mat\n"]))


@pytest.mark.parametrize(
    ("change", "written"),
    [
        (lambda data: None, True),
        (lambda data: data["model"].update(end_of_word_suffix="</w>"), False),
        (lambda data: data["model"]["vocab"].pop("\u00ff"), False),  # the last of all bytes
        (lambda data: data["added_tokens"][1].update(id=3_000_000_000), False),
        (lambda data: data["added_tokens"][1].update(lstrip=True), False),
        (lambda data: data["added_tokens"][1].update(special=False, normalized=True), False),
    ],
)
def test_byte_level_subwords_of_other_ids_have_no_tokenizer_there(
    change: Callable[[dict[str, Any]], object], written: bool, byte_level: SubwordVocab
) -> None:
    change(data := json.loads(byte_level.content))
    changed = SubwordVocab(
        "tokenizers", json.dumps(data).encode(), size=byte_level.size, special=byte_level.special
    )
    assert bool(_tokenizer_files(changed)) == written

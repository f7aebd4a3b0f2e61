"""Token ids and subwords go the whole way: prepared, trained, evaluated, exported, checked, generated."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runtimes.contract.vocabulary import load_vocab
from tests.commands import json_of, xl
from trainer.data.dataset import open_dataset
from trainer.data.text import load_splits

KINDS = ("ids", "subword")


@pytest.mark.parametrize("kind", KINDS)
def test_the_chain_from_dataset_to_generated_tokens(kind: str, chain: Callable[..., Any]) -> None:
    made = chain(kind)
    run, artefact = made.run, made.artefact
    vocab = load_vocab(artefact / "vocab.json")
    assert vocab.to_json() == open_dataset(made.dataset).vocab.to_json()
    check = xl("check", artefact)
    assert check.exit_code == 0, check.output
    scores = [
        json_of(xl("eval", folder, "--text", text, "--json"))
        for folder in (run, artefact)
        for text in (run / "test.npy", made.dataset)
    ]
    bits = [score["bits_per_token"] for score in scores]
    assert bits == pytest.approx([bits[0]] * 4, abs=1e-4)
    prompt = ["--prompt-ids", "1,2,3"] if kind == "ids" else ["--prompt", "The "]
    generated = [
        xl("generate", folder, *prompt, "--tokens", "5", "--temperature", "0", "--ids")
        for folder in (run, artefact)
    ]
    assert generated[0].exit_code == 0, generated[0].output
    assert generated[0].stdout == generated[1].stdout


@pytest.mark.parametrize("kind", KINDS)
def test_info_shows_vocabulary_and_training(kind: str, chain: Callable[..., Any]) -> None:
    made = chain(kind)
    special = (
        {"end_of_document": 0} if kind == "ids" else load_vocab(made.run / "vocab.json").special.to_json()
    )
    expected = {"kind": kind, "size": 12 if kind == "ids" else 300, "special": special}
    expected |= {} if kind == "ids" else {"library": "tokenizers"}
    for folder in (made.run, made.artefact):
        assert json_of(xl("info", folder, "--json"))["vocabulary"] == expected
        shown = xl("info", folder, "--all").stdout
        assert f"vocabulary.special.end_of_document {special['end_of_document']}\n" in shown
    facts = json_of(xl("info", made.run, "--json"))
    training = facts["training"]
    assert (training["step"], training["steps"], training["data"]) == (4, 4, str(made.dataset))
    assert training["best"]["step"] == 4
    assert training["recipe"]["learning_rate"] == 0.004
    assert facts["concern"] is None


def test_a_run_keeps_its_tokenizer(chain: Callable[..., Any], tmp_path: Path, text: str) -> None:
    tokenizer = tmp_path / "mine.json"
    shutil.copy(chain("subword").dataset / "tokenizer.json", tokenizer)
    (tmp_path / "a.txt").write_text(text[:20_000], encoding="utf-8")
    options = ["--text", tmp_path / "a.txt", "--vocab", tokenizer, "--steps", "2"]
    result = xl("train", "tiny", *options, "--out", tmp_path / "run")
    assert result.exit_code == 0, result.output
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["vocab"] == str(tokenizer)
    ids = load_vocab(tmp_path / "run" / "vocab.json").encode(load_splits(str(tmp_path / "a.txt")).train)
    assert f"{(len(ids) + 1) // 8 * 8:,} tokens" in result.stdout  # one end of document, 8 lanes
    tokenizer.unlink()
    resumed = xl("train", "--resume", tmp_path / "run")
    assert resumed.exit_code == 0, resumed.output
    assert "is finished already" in resumed.stdout


def test_the_recipe_of_a_corpus_takes_own_data(tmp_path: Path, chain: Callable[..., Any]) -> None:
    made = chain("ids")
    config = json.loads((made.run / "config.json").read_text()) | {"corpus": "enwik8", "data": None}
    config["model"]["vocab_size"] = 0
    (tmp_path / "own.json").write_text(json.dumps(config | {"steps": 1, "schedule": {}}))
    result = xl("train", tmp_path / "own.json", "--data", made.dataset, "--out", tmp_path / "run")
    assert result.exit_code == 0, result.output
    assert "Warning" not in result.stderr


def test_a_run_without_validation_is_not_called_ready(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.txt").write_text(text[:3_000], encoding="utf-8")
    (tmp_path / "short.txt").write_text("ab" * 10)
    options = ["--text", tmp_path / "short.txt", "--steps", "1", "--out", tmp_path / "run"]
    config = json.loads(Path("trainer/configs/small/tiny.json").read_text()) | {"batch": 1, "schedule": {}}
    config["training"] = {"mem_len": 4, "segment": 4}
    (tmp_path / "c.json").write_text(json.dumps(config))
    trained = xl("train", tmp_path / "c.json", *options)
    assert trained.exit_code == 0, trained.output
    assert "has finished" in trained.stdout
    concern = "this run was never validated"
    assert f"warning     {concern}" in xl("info", tmp_path / "run").stdout
    exported = xl("export", tmp_path / "run", "--out", tmp_path / "artefact")
    assert f"Warning: {concern}" in exported.stderr
    assert "is written: ring memory" in exported.stdout
    assert "ready" not in exported.stdout
    assert f"warning     {concern}" in xl("info", tmp_path / "artefact").stdout
    assert json_of(xl("info", tmp_path / "artefact", "--json"))["trained_tokens"] == 4
    state = tmp_path / "run" / "training.safetensors"
    state.write_bytes(state.read_bytes()[:100])  # neither `info` nor `export` needs it
    concern = "how this run was trained is unknown, because its training.safetensors is missing or damaged"
    assert f"warning     {concern}" in xl("info", tmp_path / "run", "--all").stdout
    exported = xl("export", tmp_path / "run", "--out", tmp_path / "artefact", "--force")
    assert exported.exit_code == 0, exported.output
    assert f"Warning: {concern}" in exported.stderr
    assert json_of(xl("info", tmp_path / "artefact", "--json"))["trained_tokens"] is None

"""`xl-export eval`: sweeps, losses to a file, token ids, and what it refuses."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from runtimes.base.files import write_json
from runtimes.base.npz import read_npz
from runtimes.cli.eval import write_losses
from runtimes.contract.rule import MemoryRule
from runtimes.contract.vocabulary import ByteVocab, CharVocab, Vocab, WordVocab
from runtimes.tasks.evaluate import Score
from tests.commands import json_of, refused, xl

NASTY = ['"', ",", "\n", "\r", "=", "\x00", "é", "\u2028", "#", "\ud800", "a"]
COMPUTED_BY_PYTORCH = {"computed_by": "PyTorch", "kernel": None}


@pytest.fixture
def text_file(text: str, tmp_path: Path) -> Path:
    (tmp_path / "some.txt").write_text(text[:400], encoding="utf-8")
    return tmp_path / "some.txt"


@pytest.fixture
def word_run(run: Path, tmp_path: Path, text: str) -> Path:
    """The run again, with a vocabulary of words of the same size."""
    folder = Path(shutil.copytree(run, tmp_path / "words"))
    size = CharVocab.build(text).size
    words = list(dict.fromkeys(text.split()))[10:]  # the first ones are unknown to it
    write_json(folder / "vocab.json", {"kind": "word", "symbols": ["<unk>", "<eos>", *words][:size]})
    return folder


def without_speed(figures: dict) -> dict:
    return {key: value for key, value in figures.items() if key != "tokens_per_second"}


@pytest.mark.parametrize("options", [("--json",), ("--mem-len", "4,16")], ids=str)
def test_a_diverged_checkpoint_ends_in_one_sentence(
    run: Path, text_file: Path, tmp_path: Path, options: tuple
) -> None:
    from safetensors.torch import load_file, save_file

    broken = Path(shutil.copytree(run, tmp_path / "broken"))
    tensors = load_file(broken / "model.safetensors")
    tensors["blocks.1.out.weight"][0, 0] = float("nan")
    save_file(tensors, broken / "model.safetensors")
    losses = () if "4,16" in options else ("--losses", tmp_path / "losses.csv")
    result = xl("eval", broken, "--text", text_file, *options, *losses)
    refused(
        result,
        "gives token 1 of the text a log-probability that is not a number",
        "take an earlier checkpoint",
    )
    assert "nan" not in result.stdout
    assert not (tmp_path / "losses.csv").exists()


def test_a_sweep_prints_the_figures_of_each_setting(run: Path, text_file: Path) -> None:
    options = ("--text", text_file, "--lanes", 2, "--json")
    sweep = ("--mem-len", "4,16", "--segment", "24", "--clamp-len", "0,3")
    document = json_of(xl("eval", run, *options, *sweep))
    assert len(document["rows"]) == 4
    for row in document["rows"][::3]:
        setting = (
            "--mem-len",
            row["mem_len"],
            "--segment",
            row["segment"],
            "--clamp-len",
            row["clamp_len"] or 0,
        )
        alone = json_of(xl("eval", run, *options, *setting))
        assert without_speed(alone) == without_speed(row) | COMPUTED_BY_PYTORCH
    nats = [row["nats"] for row in document["rows"]]
    assert len({round(value, 3) for value in nats}) == 4  # memory and clamp change the score
    assert document["best"] == int(np.argmin(nats))
    lines = xl("eval", run, *options[:-1], *sweep).stdout.splitlines()
    assert lines[0].split() == [
        "mem_len",
        "segment",
        "clamp_len",
        "bits",
        "per",
        "character",
        "perplexity",
        "tokens/s",
    ]
    assert lines[1].split()[:4] == ["4", "24", "none", f"{document['rows'][0]['bits_per_token']:.4f}"]
    best = document["rows"][document["best"]]
    assert lines[5].split(maxsplit=1) == [
        "best",
        f"mem_len {best['mem_len']}, segment {best['segment']}, clamp_len {best['clamp_len'] or 'none'}",
    ]


def test_characters_and_words_have_their_own_figures(
    run: Path, word_run: Path, text: str, text_file: Path
) -> None:
    characters = xl("eval", run, "--text", text_file).stdout.splitlines()
    assert characters[0].startswith("bits per character  ")
    assert [line.split()[0] for line in characters] == ["bits", "speed", "settings", "computed"]
    words = xl("eval", word_run, "--text", text_file)
    figures = json_of(xl("eval", word_run, "--text", text_file, "--json"))
    assert words.stdout.startswith(f"perplexity          {figures['perplexity']:.3f}")
    symbols = json.loads((word_run / "vocab.json").read_text())["symbols"]
    seen = text[:400].split()
    unknown = sum(word not in symbols for word in seen) - (seen[0] not in symbols)
    assert figures["unknown_share"] == pytest.approx(unknown / figures["tokens"])
    assert f"unknown words       {figures['unknown_share']:.2%}" in words.stdout


@pytest.mark.parametrize("kind", ["ring", "torch"])
def test_losses_are_written_with_their_settings(
    kind: str, run: Path, artefacts: dict, text_file: Path, tmp_path: Path
) -> None:
    folder = run if kind == "torch" else artefacts[kind]
    options = ("--text", text_file, "--lanes", 3, "--segment", 5, "--json")
    figures = json_of(xl("eval", folder, *options, "--losses", tmp_path / "losses.npz"))
    del figures["kernel"], figures["computed_by"]
    arrays = read_npz(tmp_path / "losses.npz")
    assert arrays["nats"].shape == arrays["tokens"].shape == (399,)
    assert float(arrays["nats"].sum()) == pytest.approx(figures["nats"], rel=1e-5)
    settings = without_speed(json.loads(str(arrays["settings"])))
    assert settings == {name: figures[name] for name in settings}
    assert {"nats", "mem_len", "segment", "lanes"} <= settings.keys()
    assert xl("eval", folder, *options, "--losses", tmp_path / "losses.csv").exit_code == 0
    assert len((tmp_path / "losses.csv").read_text(encoding="utf-8").split("\n")) == 1 + 1 + 399 + 1


@pytest.mark.parametrize("suffix", [".npz", ".csv"])
@pytest.mark.parametrize(
    "vocab", [CharVocab(NASTY), WordVocab(["<unk>", "<eos>", *NASTY[:2], *NASTY[4:]]), ByteVocab()]
)
def test_losses_come_back(vocab: Vocab, suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"losses{suffix}"
    tokens = np.random.default_rng(0).permutation(vocab.size)
    nats = np.linspace(0, 3, len(tokens) - 1)
    score = Score(
        tokens=len(nats),
        nats=float(nats.sum()),
        seconds=1.0,
        segment=8,
        lanes=1,
        memory_carried=True,
        rule=MemoryRule(mem_len=4, segment=8),
        token_nats=nats,
    )
    write_losses(path, score, tokens, vocab)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    if suffix == ".npz":
        arrays = read_npz(path)
        assert arrays["nats"].dtype == np.float32
        assert np.allclose(arrays["nats"], nats)
        assert arrays["tokens"].tolist() == tokens[1:].tolist()
        assert json.loads(str(arrays["settings"]))["mem_len"] == 4
        return
    first, *lines = path.read_text(encoding="utf-8").split("\n")
    rows = list(csv.DictReader(lines[:-1]))
    assert first.startswith("# ")
    assert json.loads(first[2:]) == score.to_json()
    assert [int(row["position"]) for row in rows] == list(range(1, len(tokens)))
    assert [int(row["token"]) for row in rows] == tokens[1:].tolist()
    assert np.allclose([float(row["nats"]) for row in rows], nats, atol=1e-6)
    decode = vocab.decoder()
    assert [json.loads(row["text"]) for row in rows] == [decode(int(token)) for token in tokens][1:]
    assert all(row["text"].startswith('"') for row in rows)  # no spreadsheet takes it for a formula


def test_losses_are_replaced_only_when_that_is_asked_for(run: Path, text_file: Path, tmp_path: Path) -> None:
    (tmp_path / "losses.csv").write_text("mine")
    options = ("--text", text_file, "--losses", tmp_path / "losses.csv")
    refused(xl("eval", run, *options), "losses.csv exists already", "--force")
    assert (tmp_path / "losses.csv").read_text() == "mine"
    assert xl("eval", run, *options, "--force").exit_code == 0
    assert (tmp_path / "losses.csv").read_text() != "mine"


def test_token_ids_score_as_their_text(
    run: Path, text_file: Path, tokens: np.ndarray, tmp_path: Path
) -> None:
    np.save(tmp_path / "some.npy", tokens[:400].astype(np.uint8))
    from_ids = json_of(xl("eval", run, "--text", tmp_path / "some.npy", "--ids", "--json"))
    assert without_speed(from_ids) == without_speed(json_of(xl("eval", run, "--text", text_file, "--json")))

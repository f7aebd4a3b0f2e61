"""`xl-export import`: what it recognises, prints, writes and refuses."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from runtimes.contract.rule import MemoryRule
from tests.architectures import ARCHITECTURES, RULE
from tests.commands import json_of, refused, xl
from tests.nightly import every
from tests.xl_export.importers.oracles import DATA
from trainer.model.attention import relative_attention
from trainer.run.checkpoint import load_run
from trainer.run.history import read_config
from xl_export.importers import FORMATS, formats, kimiyoung, self_check, tensorflow
from xl_export.importers.shared.checkpoint import Checkpoint, ImportOptions
from xl_export.importers.shared.settings import PUBLISHED, Settings, read_settings

BYTES = DATA / "kimiyoung-enwik8"


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("kimiyoung-ptb-full-mask/model_legacy.pt", "kimiyoung"),
        ("adaptive-span-persistent/checkpoint_legacy.pt", "adaptive-span"),
        ("nvidia-wt103-base/checkpoint_last.pt", "nvidia"),
        ("hf-wt103/pretrained/config.json", "huggingface"),
    ],
)
def test_describe_recognises_content_and_writes_nothing(file: str, name: str, tmp_path: Path) -> None:
    folder = Path(shutil.copytree((DATA / file).parent, tmp_path / "source"))
    source = (folder / Path(file).name).rename(folder / "whatever.bin") if file.endswith(".pt") else folder
    before = sorted(tmp_path.rglob("*"))
    facts = json_of(xl("import", source, "--describe", "--json"))
    assert facts["format"] == name
    assert sorted(tmp_path.rglob("*")) == before


def test_the_published_settings_are_the_default(tmp_path: Path) -> None:
    result = xl("import", BYTES, "--out", tmp_path / "run")
    assert "mem_len 2100 (published for enwik8 base)" in result.output
    assert "both are this project's, so compare losses with your project's too" in result.output
    config = load_run(tmp_path / "run").config
    assert config.evaluation == MemoryRule(mem_len=2099, segment=80, clamp_len=820)
    assert config.vocab == "byte"
    record = json.loads((tmp_path / "run" / "import.json").read_text())
    assert record["files"]["model"]["sha256"][:8] in result.output
    assert record["settings"]["segment"] == {"value": 80, "origin": "published for enwik8 base"}
    refused(xl("import", BYTES, "--out", tmp_path / "run"), "exists already", "--force")
    refused(xl("train", "--resume", tmp_path / "run"), "training.safetensors")
    again = json_of(xl("import", BYTES, "--out", tmp_path / "run", "--force", "--segment", 5, "--json"))
    assert load_run(tmp_path / "run").config.evaluation.segment == 5
    assert (again["run"], again["parameters"], "model" in again) == (str(tmp_path / "run"), 68_619, False)
    sizes = {"layers": 4, "d_model": 40, "heads": 4, "head_dim": 12, "d_ff": 80, "persistent": 0}
    assert again["sizes"] == sizes | {"vocab_size": 83}


def test_options_override_the_settings_file(tmp_path: Path) -> None:
    (tmp_path / "settings.json").write_text('{"mem_len": 30, "segment": 7, "mask": "full"}')
    options = ("--settings", tmp_path / "settings.json", "--mem-len", 20, "--clamp-len", -1)
    record = json_of(xl("import", BYTES, "--describe", "--json", *options))
    assert record["settings"] == {
        "mem_len": {"value": 20, "origin": "option"},
        "segment": {"value": 7, "origin": str(tmp_path / "settings.json")},
        "mask": {"value": "full", "origin": str(tmp_path / "settings.json")},
        "clamp_len": {"value": 0, "origin": "option"},
    }
    assert record["rule"]["mem_len"] == 20  # the full mask counts memory alone
    assert record["rule"]["clamp_len"] is None


def test_a_model_of_ids_needs_no_vocabulary(tmp_path: Path) -> None:
    assert xl("import", BYTES, "--vocab", "ids", "--out", tmp_path / "run").exit_code == 0
    document = json.loads(
        xl("generate", tmp_path / "run", "--prompt-ids", "1,2", "--tokens", 3, "--json").stdout.splitlines()[
            -1
        ]
    )
    assert document["prompt_ids"] == [1, 2]
    assert document["text"].split() == [str(token) for token in document["ids"]]
    refused(
        xl("generate", tmp_path / "run", "--prompt", "the"),
        "'the', word 1 of the text",
        "numbers of this model",
    )


@pytest.mark.parametrize("name", every(14, ARCHITECTURES))
def test_a_run_of_ours_comes_back_identical(name: str, make_run: Callable[..., Path], tmp_path: Path) -> None:
    options: dict[str, Any] = dict(ARCHITECTURES[name])
    run = make_run(**{"rule": RULE} | options)
    assert xl("import", run, "--out", tmp_path / "copy").exit_code == 0
    for file in ("vocab.json", "model.safetensors"):
        assert (tmp_path / "copy" / file).read_bytes() == (run / file).read_bytes(), file
    assert read_config(tmp_path / "copy") == read_config(run)


def test_an_import_whose_two_forms_differ_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a term were read otherwise by the fast attention: no run appears."""
    wrong = partial(wrong_attention, 1.01)
    assert self_check.check_import(checkpoint_of(BYTES)) < 1e-5
    monkeypatch.setattr(self_check, "relative_attention", wrong)
    result = xl("import", BYTES, "--out", tmp_path / "run")
    refused(result, "model.pt was read", "not computed alike", "nothing was written")
    assert not (tmp_path / "run").exists()


def wrong_attention(factor: float, query: Tensor, *others: Tensor, **options: Any) -> Tensor:
    return relative_attention(query * factor, *others, **options)


def checkpoint_of(folder: Path) -> Checkpoint:
    opened = formats.open_source(folder)
    return FORMATS[formats.recognise(opened)].project.read(opened, ImportOptions())


def test_a_pickle_posing_as_a_configuration_is_no_format(tmp_path: Path) -> None:
    for content in (
        {"model_type": "transfo-xl"},
        {"model": {}, "evaluation": {}},
        {"model_config": 0, "model_state": 0},
    ):
        torch.save(content, tmp_path / "model.pt")
        assert xl("import", tmp_path / "model.pt", "--describe").exit_code == 2


def test_settings_have_our_names_or_theirs(tmp_path: Path) -> None:
    given: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"clamp_len": None, "mem_len": None}, {"clamp_len": 0}),
        ({"tgt_len": 7, "same_length": False}, {"segment": 7, "mask": "full"}),
        ({"eval_tgt_len": 7, "tgt_len": 7, "same_length": True, "mask": "same-length"},
         {"segment": 7, "mask": "same-length"}),
        ({"block_sz": 6, "tgt_len": None, "adapt_span_ramp": 5}, {"segment": 6, "ramp": 5}),
    ]  # fmt: skip
    for theirs, ours in given:
        (tmp_path / "settings.json").write_text(json.dumps(theirs))
        assert read_settings(tmp_path / "settings.json") == Settings(**ours)


def test_notes_say_what_could_not_be_known() -> None:
    sizes = "this is not the published enwik8 base (12 layers, D 512)"
    shown = xl("import", BYTES, "--describe").output
    assert sizes in shown
    assert "give --mem-len, --segment, --mask, --clamp-len, or" in shown
    lengths = ("--mem-len", 5, "--segment", 6, "--mask", "full", "--clamp-len", 0)
    assert "this is not the published" not in xl("import", BYTES, "--describe", *lengths).output
    only = "only its size could be checked"
    assert only not in xl("import", BYTES, "--describe").output
    assert only in xl("import", BYTES, "--describe", "--vocab", BYTES / "cache.pt").output


def test_a_missing_file_is_named_without_pytorch(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules.update(dict.fromkeys(['torch', 'safetensors']));"
        "from xl_export.cli.main import main; main()"
    )
    command = [sys.executable, "-c", code, "import", tmp_path / "foo.pt", "--describe"]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 2
    assert "foo.pt does not exist; give the file or folder of a checkpoint." in ended.stderr


class OwnModel(torch.nn.Module):
    """A model of a user, in a module of its own."""


@pytest.mark.parametrize("content", [OwnModel(), torch.nn.Linear(2, 2), torch.nn.Linear(2, 2).state_dict()])
def test_a_model_of_ones_own_is_pointed_to_its_guide(content: Any, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "my.pt")
    for command in ("import", "export"):
        refused(xl(command, tmp_path / "my.pt", "--out", tmp_path / "out"), "docs/guides/own-model.md")


WORDS_103, WORDS_1B = (20000, 40000, 200000), (60000, 100000, 640000)


@pytest.mark.parametrize(
    ("dataset", "cutoffs", "d_model", "row"),
    [
        ("enwik8", (), 512, "enwik8 base"),
        ("text8", (), 1024, "text8 large"),
        ("wt103", WORDS_103, 410, "wt103 base"),
        ("wt103", WORDS_103, 1024, "wt103 large"),
        ("lm1b", WORDS_1B, 1280, "lm1b"),
    ],
)
def test_published_settings_are_found_by_data_set_and_size(
    dataset: str, cutoffs: tuple[int, ...], d_model: int, row: str
) -> None:
    facts = SimpleNamespace(d_model=d_model, cutoffs=cutoffs, attention_type=0)
    known: Any = SimpleNamespace(facts=facts, dataset=dataset, stored=None)
    unknown: Any = SimpleNamespace(facts=facts, dataset=None, stored=None)  # a vocab.txt does not name it
    published = PUBLISHED[row]
    expected = [published.mem_len, published.segment, "same-length", published.clamp_len]
    for project, reading in (
        (kimiyoung.PROJECT, known),
        (tensorflow.PROJECT, known),
        (tensorflow.PROJECT, unknown),
    ):
        assert [setting.value for setting in project.defaults(reading).values()] == expected

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
from safetensors.torch import load_file
from torch import Tensor

from runtimes.contract.rule import MemoryRule
from tests.architectures import ARCHITECTURES, RULE
from tests.commands import json_of, refused, xl
from tests.nightly import every
from tests.xl_export.importers.oracles import DATA, FOLDERS, NAMES
from trainer.model.attention import relative_attention
from trainer.run.checkpoint import load_run
from xl_export.importers import FILES, formats, huggingface, kimiyoung, nvidia, self_check, tensorflow
from xl_export.importers.shared.checkpoint import Checkpoint, ImportOptions
from xl_export.importers.shared.settings import SIZES, size_notes

FORMATS = {
    "kimiyoung-enwik8": "kimiyoung",
    "kimiyoung-wt103-large": "kimiyoung",
    "kimiyoung-ptb-full-mask": "kimiyoung",
    "adaptive-span-enwik8": "adaptive-span",
    "adaptive-span-persistent": "adaptive-span",
    "hf-wt103": "huggingface",
    "nvidia-wt103-base": "nvidia",
}
BYTES = DATA / "kimiyoung-enwik8"


def test_the_command_offers_the_formats_that_there_are() -> None:
    assert list(FILES) == list(formats.FORMATS)


@pytest.mark.parametrize("name", NAMES)
def test_describe_recognises_each_format_and_writes_nothing(name: str, tmp_path: Path) -> None:
    folder = shutil.copytree(FOLDERS.get(name, DATA / name), tmp_path / "source")
    before = sorted(tmp_path.rglob("*"))
    result = xl("import", folder, "--describe")
    for word in (f"format      {FORMATS[name]}:", "sizes ", "tokens ", "setting ", "here "):
        assert word in result.output
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("kimiyoung-ptb-full-mask/model_legacy.pt", "kimiyoung"),
        ("adaptive-span-persistent/checkpoint_legacy.pt", "adaptive-span"),
        ("nvidia-wt103-base/checkpoint_last.pt", "nvidia"),
        ("hf-wt103/pretrained/model.safetensors", "huggingface"),
        ("hf-wt103/pretrained/config.json", "huggingface"),
    ],
)
def test_files_are_recognised_by_what_is_in_them(file: str, name: str, tmp_path: Path) -> None:
    source = DATA / file
    if source.suffix == ".pt":
        source = shutil.copy(source, tmp_path / "whatever.bin")
        shutil.copy(
            next(path for path in (DATA / file).parent.glob("c*.pt") if path.stem in ("cache", "corpus")),
            tmp_path,
        )
    assert json_of(xl("import", source, "--describe", "--json"))["format"] == name


def test_the_older_container_holds_the_same_model(tmp_path: Path) -> None:
    folder = DATA / "kimiyoung-ptb-full-mask"
    for name in ("model", "model_legacy"):
        assert xl("import", folder / f"{name}.pt", "--out", tmp_path / name).exit_code == 0
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("model", "model_legacy"))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_the_published_settings_are_the_default(tmp_path: Path) -> None:
    result = xl("import", BYTES, "--out", tmp_path / "run")
    assert "mem_len 2100 (published for enwik8 base)" in result.output
    assert "both are this project's, so compare losses with your project's too" in result.output
    rule = load_run(tmp_path / "run").config.evaluation
    assert rule == MemoryRule(mem_len=2099, segment=80, clamp_len=820)
    record = json.loads((tmp_path / "run" / "import.json").read_text())
    assert record["files"]["model"]["sha256"][:8] in result.output
    assert record["settings"]["segment"] == {"value": 80, "origin": "published for enwik8 base"}
    refused(xl("import", BYTES, "--out", tmp_path / "run"), "exists already", "--force")
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


def test_the_rest_of_the_pipeline_takes_an_imported_run(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the value of an expression\n" * 4)
    assert (
        xl(
            "import", BYTES, "--out", tmp_path / "run", "--mem-len", 20, "--segment", 8, "--clamp-len", 0
        ).exit_code
        == 0
    )
    assert xl("export", tmp_path / "run", "--out", tmp_path / "artefact").exit_code == 0
    scores = [
        json_of(xl("eval", tmp_path / name, "--text", tmp_path / "text.txt", "--json"))
        for name in ("run", "artefact")
    ]
    assert scores[0]["bits_per_token"] == pytest.approx(scores[1]["bits_per_token"], abs=1e-4)
    assert xl("generate", tmp_path / "artefact", "--prompt", "the ", "--tokens", 5).exit_code == 0
    refused(xl("train", "--resume", tmp_path / "run"), "cannot be resumed", "training.safetensors")


def test_a_model_of_ids_needs_no_vocabulary(tmp_path: Path) -> None:
    assert xl("import", BYTES, "--vocab", "ids", "--out", tmp_path / "run").exit_code == 0
    document = json.loads(
        xl("generate", tmp_path / "run", "--prompt-ids", "1,2", "--tokens", 3, "--json").stdout.splitlines()[
            -1
        ]
    )
    assert document["prompt_ids"] == [1, 2]
    assert document["text"].split() == [str(token) for token in document["ids"]]
    refused(xl("generate", tmp_path / "run", "--prompt", "the"), "takes token ids", "and no text")


@pytest.mark.parametrize("name", every(7, ARCHITECTURES))
def test_a_run_of_ours_comes_back_identical(name: str, make_run: Callable[..., Path], tmp_path: Path) -> None:
    options: dict[str, Any] = dict(ARCHITECTURES[name])
    run = make_run(**{"rule": RULE} | options)
    assert xl("import", run, "--out", tmp_path / "copy").exit_code == 0
    for file in ("config.json", "vocab.json", "model.safetensors"):
        assert (tmp_path / "copy" / file).read_bytes() == (run / file).read_bytes(), file


def test_the_rule_of_a_run_of_ours_can_be_given(run: Path, tmp_path: Path) -> None:
    assert xl("import", run, "--out", tmp_path / "copy", "--mem-len", 5, "--clamp-len", 3).exit_code == 0
    assert load_run(tmp_path / "copy").config.evaluation == MemoryRule(mem_len=5, segment=8, clamp_len=3)


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
    return formats.FORMATS[formats.recognise(opened)].read(opened, ImportOptions())


def test_a_pickle_posing_as_a_configuration_is_no_format(tmp_path: Path) -> None:
    for content in (
        {"model_type": "transfo-xl"},
        {"model": {}, "evaluation": {}},
        {"model_config": 0, "model_state": 0},
    ):
        torch.save(content, tmp_path / "model.pt")
        assert xl("import", tmp_path / "model.pt", "--describe").exit_code == 2


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({"clamp_len": None}, {"clamp_len": None}),
        ({"clamp_len": None, "mem_len": None}, {"clamp_len": None, "mem_len": 2099}),
        ({"tgt_len": 7, "same_length": False, "mem_len": 9}, {"segment": 7, "mask": "full", "mem_len": 9}),
        (
            {"eval_tgt_len": 7, "tgt_len": 7, "same_length": True, "mask": "same-length"},
            {"segment": 7, "mask": "same-length"},
        ),
        ({"block_sz": 6, "tgt_len": None}, {"segment": 6}),
    ],
)
def test_settings_are_taken_by_our_names_or_theirs(
    settings: dict[str, Any], rule: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "settings.json").write_text(json.dumps(settings))
    document = json_of(xl("import", BYTES, "--describe", "--json", "--settings", tmp_path / "settings.json"))
    assert {name: document["rule"][name] for name in rule} == rule


def test_the_ramp_is_taken_by_its_projects_word(tmp_path: Path) -> None:
    (tmp_path / "settings.json").write_text('{"adapt_span_ramp": 5}')
    options = ("--describe", "--json", "--settings", tmp_path / "settings.json")
    assert json_of(xl("import", DATA / "adaptive-span-enwik8", *options))["settings"]["ramp"]["value"] == 5


def test_notes_say_what_could_not_be_known() -> None:
    sizes = "sizes differ from the published enwik8 base (12 layers, D 512)"
    assert (
        f"{sizes}: give --mem-len, --segment, --mask, --clamp-len if"
        in xl("import", BYTES, "--describe").output
    )
    lengths = ("--mem-len", 5, "--segment", 6, "--mask", "full", "--clamp-len", 0)
    assert "sizes differ" not in xl("import", BYTES, "--describe", *lengths).output
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


# From the evaluation in tf/sota/*.sh and tf/scripts/*_base_gpu.sh, and in pytorch/run_*.sh: the data set,
# cutoffs and d_model; the segment, mem_len and clamp_len. All give --same_length.
WORDS_103, WORDS_1B = (20000, 40000, 200000), (60000, 100000, 640000)
SCRIPTS: dict[str, tuple[str, tuple[int, ...], int, int, int, int]] = {
    "enwik8 base": ("enwik8", (), 512, 80, 2100, 820),
    "enwik8 large": ("enwik8", (), 1024, 128, 3800, 1000),
    "text8 base": ("text8", (), 512, 80, 2100, 820),
    "text8 large": ("text8", (), 1024, 128, 3800, 1000),
    "wt103 base": ("wt103", WORDS_103, 410, 64, 640, 400),
    "wt103 large": ("wt103", WORDS_103, 1024, 128, 1600, 1000),
    "lm1b base": ("lm1b", WORDS_1B, 1024, 32, 128, 0),
    "lm1b large": ("lm1b", WORDS_1B, 1280, 32, 128, 0),
}


@pytest.mark.parametrize("script", SCRIPTS)
def test_published_settings_are_those_of_the_scripts(script: str) -> None:
    dataset, cutoffs, d_model, segment, mem_len, clamp_len = SCRIPTS[script]
    facts: Any = SimpleNamespace(d_model=d_model, cutoffs=cutoffs)
    expected = {"mem_len": mem_len, "segment": segment, "mask": "same-length", "clamp_len": clamp_len}
    found = [
        tensorflow.defaults(facts, dataset),
        tensorflow.defaults(facts, None),  # a vocab.txt does not name the data set
        kimiyoung.published_for(dataset, facts),
        *([nvidia.defaults(facts)] if dataset == "wt103" else []),
    ]
    assert [{name: setting.value for name, setting in each.items()} for each in found] == [expected] * len(
        found
    )


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("dataset", ["enwik8", "text8", "wt103", "lm1b"])
def test_published_evaluations_are_compared_with_the_models_sizes(dataset: str, large: bool) -> None:
    """A model of another size may have been evaluated otherwise, and only its owner knows how."""
    facts: Any = SimpleNamespace(d_model=1024 if large else 512, cutoffs=())
    for settings in (
        kimiyoung.published_for(dataset, facts),
        tensorflow.defaults(facts, dataset),
        nvidia.defaults(facts),
        {"segment": huggingface.SEGMENT},
    ):
        (note,) = size_notes(settings, layers=3, d_model=64)
        assert note.startswith("sizes differ from the published ")
    (model,) = {setting.origin for setting in kimiyoung.published_for(dataset, facts).values()}
    for layers, d_model in SIZES[model.removeprefix("published for ")]:
        assert size_notes(kimiyoung.published_for(dataset, facts), layers=layers, d_model=d_model) == []


def test_bare_weights_are_called_so(tmp_path: Path) -> None:
    torch.save({"layers.0.weight": torch.zeros(2)}, tmp_path / "model.pt")
    refused(
        xl("import", tmp_path / "model.pt", "--describe"),
        "holds the tensors of a model that is not known here, such as layers.0.weight",
    )


def test_the_current_folder_is_named_where_it_lacks_the_vocabulary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(DATA / "variants/kimiyoung-shaw/model.pt", tmp_path)
    monkeypatch.chdir(tmp_path)
    refused(xl("import", "model.pt", "--describe"), f"Error: {tmp_path.resolve()} has no cache.pt")

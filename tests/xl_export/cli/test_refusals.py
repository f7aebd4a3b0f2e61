"""What commands refuse: exit code 2, one sentence that says what to do, and nothing written.

A row is a command, the names that its sentence must hold (options, fields, files, values), and files that it
needs in the working folder: their content, or None for one that is removed. How the sentence puts it is free.
`copy` is a copy of a run there; names in braces are the artefacts, runs and data sets of `place`.
"""

from __future__ import annotations

import functools
import json
import math
import shlex
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import click
import numpy as np
import pytest

from runtimes.base.kinds import (
    ARTEFACT,
    DATASET,
    ENGINE,
    IMPORTED,
    PICTURES,
    POLYGRAPHY,
    RUN,
    SERVER_MODEL,
    SITE,
    Kind,
)
from runtimes.base.options import declared
from runtimes.base.ranges import ANY
from runtimes.cli.options import Number, name_of
from runtimes.contract.sampling import Sampler
from tests.architectures import ALL_ATTENTION, ARCHITECTURES
from tests.commands import refused, xl
from tests.trainer.data.corpus_files import make_source
from tests.xl_export.importers.oracles import DATA
from trainer.data.prepare import prepare
from trainer.run.config import TrainConfig
from xl_export.cli.main import main
from xl_export.importers.shared.settings import Settings
from xl_export.serve.core.settings import EngineSettings, Limits, StoreSettings
from xl_export.tensorrt.options import BuildOptions

Files = dict[str, bytes | str | None]
BAD_TEXTS: Files = {"empty.txt": "", "few.txt": "ab", "odd.txt": "§" * 4000, "latin.txt": b"abc\xff" * 999}
BYTES, VARIANTS = DATA / "kimiyoung-enwik8", DATA / "variants"
SETTINGS = f"import {BYTES} --describe --settings settings.json"


def setting(content: str, names: str) -> tuple[str, str, Files]:
    """A row whose settings.json has this content."""
    return SETTINGS, names, {"settings.json": content}


def checkpoint(names: str, source: str = "source", **files: bytes) -> tuple[str, str, Files]:
    """A row that describes files which are no checkpoint."""
    named: Files = {f"source/{name.replace('__', '.')}": content for name, content in files.items()}
    return f"import {source} --describe", names, named


def variant(name: str, options: str, names: str) -> tuple[str, str]:
    """A row that imports a checkpoint of tests/data/variants."""
    folder = VARIANTS / name
    return f"import {folder} --vocab {folder}/vocab.txt --describe {options}", names


TRAIN = [
    ("train tiny", "--out --resume"),
    ("train tiny --out out --resume {trained}", "--out --resume"),
    ("train tiny --resume {trained}", "CONFIG --force"),
    ("train --resume {trained} --force", "CONFIG --force"),
    ("train --show tiny --data data --min-count 2", "--min-count data"),
    ("train wt103-bas --out out", "wt103-base --list"),
    ("train mine.json --out out", "'stepz'", {"mine.json": '{"stepz": 1}'}),
    # texts and data sets
    ("train tiny --text none.txt --out out", "none.txt"),
    ("train tiny --text few.txt --out out", "tokens lanes"),
    ("train tiny --text latin.txt --out out", "latin.txt 0xff"),
    ("train tiny --text ids.npy --out out", "ids.npy prepare tokens"),
    ("train tiny --text {data} --out out", "dataset --data"),
    ("train tiny --text folder --out out", "folder prepare text", {"folder/a": ""}),
    ("train tiny --data nosuch --out out", "nosuch dataset"),
    ("train tiny --text {trained}/test.npy --out {trained} --force", "test.npy"),
    ("train tiny --data {data} --vocab byte --out out", "--vocab dataset"),
    ("train wt103-base --out out", "wikitext-103 --text"),
    ("train enwik8-base --data {ptb} --out out", "penn-treebank enwik8"),
    # vocabularies
    ("train --text text.txt --vocab words --out out", "'words' word"),
    ("train --text text.txt --vocab {data}/vocab.json --out out", "'The'"),
    # resuming
    ("train --resume none", "none run"),
    ("train --resume {ring}", "artefact run"),
    ("train --resume {data}", "dataset run --data"),
    ("train --resume {run}", "training.safetensors"),
    ("train --resume {trained} --steps 3", "--steps 3 4"),
    *((f"train --resume {{trained}} {option}", "--resume " + option.split()[0])
      for option in ("--seed 1", "--vocab byte", "--max-size 9", "--set seed=2")),
    # plans and new runs from old ones
    ("train --text odd.txt --minutes 3 --steps 2 --out out", "--minutes --steps"),
    ("train tiny --minutes 3 --out out", "--minutes CONFIG"),
    ("train tiny --from {run} --text odd.txt --out out", "--from CONFIG"),
    ("train --from {run} --out out", "--from --text FILE"),
    ("train --from {run} --text odd.txt --vocab byte --out out", "--from --vocab"),
    ("train --from {run} --text odd.txt --steps 2 --out out", "'§'"),
    # processes; refused before anything is read
    *((f"train --{source} --processes 2 --out out", "--processes CONFIG")
      for source in ("text few.txt", "data nosuch", "from {run} --text odd.txt")),
    *((f"train tiny --text long.txt --out out --processes {n}", "batch processes") for n in (3, 9)),
    # keys
    ("train --show tiny --set seed=2 --seed 3", "--set --seed"),
    ("train --show tiny --set steps=10 --set schedule.warmup_steps=100", "warmup_steps steps"),
    ("train tiny --set sead=2 --out out", "'sead' 'seed'"),
]  # fmt: skip

EXPORT = [
    ("export nosuch --out out", "nosuch run"),
    ("export {ring} --out out", "artefact"),
    ("export {data} --out out", "dataset --data"),
    ("export copy --out out", "model.safetensors", {"copy/model.safetensors": None}),
    ("export copy --out out", "vocab.json 256", {"copy/vocab.json": '{"kind": "byte"}'}),
    ("export copy --out out", "copy run", {"copy/config.json": None}),
    *((f"export {{run}} --out out {options}", names) for options, names in (
        ("--window 9", "--window Hugging"),
        ("--text text.txt", "text precision"),
        # engines
        ("--target tensorrt --precision int8-stored", "int8-stored target"),
        ("--target tensorrt --memory-precision fp16", "precision fp16"),
        ("--target tensorrt --memory hidden", "--memory hidden"),
        ("--target tensorrt --memory ring --mask full", "--memory --mask"),
        ("--target tensorrt --memory ring --mem-len 0", "--memory ring"),
        ("--target tensorrt --memory ring --exporter trace", "--memory --exporter"),
        ("--attention-as operators", "operators tensorrt"),
        ("--target web --attention-as node", "--attention-as web"),
        ("--attention-as node --memory shift", "memory --attention-as"),
        ("--attention-as node --single-file", "single-file external"),
        ("--exporter trace --target tensorrt --attention-as node", "--attention-as --exporter"),
        # fixed sizes
        ("--rows 1 --memory ring", "--rows --memory"),
        ("--rows 1 --target web", "--rows --target"),
        ("--rows 1 --exporter trace", "--rows --exporter"),
        ("--tokens 1,8", "--tokens --rows"),
        *((f"--exporter trace --target tensorrt --precision {p}", f"TensorRT {p}") for p in ("int8", "int4")),
        # memory in int8
        ("--memory-precision int8 --memory shift", "int8 shift"),
        ("--memory-precision int8 --target web", "int8 WebGPU"),
        ("--memory-precision int8 --exporter trace", "int8 scales"),
        ("--target web --exporter trace", "target traced"),
        # single files
        ("--ort --single-file", "--single-file"),
        ("--ort --fused-ort", "--fused-ort"),
        ("--ort --target tensorrt", "--ort --target"),
        ("--fused-ort --memory shift", "--fused-ort ring"),
        ("--fused-ort --exporter trace", "--fused-ort --exporter"),
    )),
]  # fmt: skip

IMPORT = [
    (f"import {BYTES}", "RUN --describe"),
    (f"import {BYTES} --describe --out x", "--describe x"),
    (f"import {BYTES}/missing.pt --describe", "missing.pt"),
    (f"import {DATA} --describe", "checkpoint_best.pt"),
    (f"import {BYTES}/cache.pt --describe", "cache.pt kimiyoung: model.pt"),
    (f"import {BYTES}/expected.npz --describe", "expected.npz"),
    (f"import {BYTES} --describe --ramp 32", "ramp mem_len, segment, mask, clamp_len"),
    (f"import {BYTES} --describe --mem-len 0", "mem_len --mask"),
    (f"import {BYTES} --describe --vocab {BYTES}/model.pt", "model.pt vocabulary"),
    (f"import {BYTES} --describe --vocab {DATA}/kimiyoung-wt103-large/cache.pt", "500 symbols"),
    (f"import {DATA}/adaptive-span-enwik8 --describe --mem-len 5", "mem_len segment, ramp"),
    (f"import {VARIANTS}/kimiyoung-shaw --describe", "kimiyoung-shaw cache.pt --vocab"),
    (f"import {BYTES} --out {{run}} --force", "import.json"),
    ("import {ring} --describe", "artefact run"),
    variant("kimiyoung-absolute", "--mem-len 4", "attn_type --mem-len"),
    variant("kimiyoung-per-layer", "--segment 13", "segment 12"),
    variant("kimiyoung-per-layer", "--clamp-len 3", "clamp_len"),
    setting("{", "settings.json JSON"),
    setting('{"attn_span": 3}', "'attn_span' segment"),
    setting('{"tgt_len": 3, "segment": 4}', "tgt_len segment"),
    setting('{"same_length": true, "mask": "full"}', "same_length mask"),
    setting('{"block_sz": "3"}', "'segment'"),
    checkpoint("source/model.pt", model__pt=b""),
    *(checkpoint("source/model.pt", "source/model.pt", model__pt=text)
      for text in (b"Some notes on it\n", b"heading of my notes\n", b"# Notes\n", "Ünicode\n".encode())),
    checkpoint("pytorch_model.bin config.json", pytorch_model__bin=b"0"),
    *((f"import source{name} --describe", "TensorFlow pip .npz", files) for name, files in (
        ("/model.ckpt-0", {"source/model.ckpt-0.index": b"0"}),
        ("", {"source/model.ckpt-0.index": b"0", "source/model.ckpt-0.meta": b"0"}),
        ("/model.ckpt-0.data-00000-of-00001", {"source/model.ckpt-0.data-00000-of-00001": b"0"}),
        ("/checkpoint", {"source/checkpoint": 'model_checkpoint_path: "/x/a-1"', "source/a-1.index": b"0"}),
    )),
]  # fmt: skip

PREPARE = [
    ("prepare token", "'token' tokens"),
    ("prepare enwik8 --from enwik8.zip --out out", "enwik8.zip --unverified"),
    ("prepare text8 --from enwik8.zip --out out", "enwik8.zip text8"),
    ("prepare enwik8 --from none.zip --out out", "none.zip --download"),
    ("prepare tokens --train n.npy --vocab-size 3 --out out", "--train"),
    ("prepare tokens --train text.txt --vocab-size 9 --out out", "text.txt 'The'"),
    ("prepare tokens --train {data} --vocab-size 9 --out out", "token ids"),
    ("prepare text --train text.txt --vocab char --max-size 9 --out out", "max_size"),
    ("prepare vocab --kind bpe --text text.txt --out v.json", "--size"),
    ("prepare vocab --kind sentencepiece --size 300 --text text.txt --out v.json", ".model"),
    ("prepare vocab --kind word --text text.txt --out kept.json", "kept.json", {"kept.json": ""}),
]  # fmt: skip

LOOK = [
    ("check nosuch", "nosuch run artefact engine"),
    *((f"{command} {{data}}", "dataset --data") for command in ("check", "info")),
    ("eval {run} --text {data}", "vocabulary"),
    ("eval {ids} --text text.txt", "text.txt 12"),
    ("generate {ids} --prompt a", "'a' 12"),
    ("generate {ids} --prompts text.txt", "text.txt 'The'"),
    ("web nosuch --out out", "nosuch artefact"),
    ("web {data} --out out", "dataset --data"),
    *((f"recl {{run}} --text text.txt --lengths {options}", names) for options, names in (
        ("8,4", "--lengths '8,4'"),
        ("8,18", "--lengths 18 --mem-len"),
        ("4,8 --positions 393", "392 393"),
        ("4,8 --r 0", "--r"),
        ("4,8 --out recl.txt", "--out .json"),
        ("4,8 --out /dev/null/recl.json", "/dev/null/recl.json"),
        ("4,8 --plot recl.svg", "--plot .png"),
    )),
    ("recl {ring} --text text.txt --lengths 4,8 --mem-len 30", "--mem-len 30"),
    ("recl {run} {reversed} --text text.txt --lengths 4,8", "reversed vocabulary"),
    *((f"attention {{run}} --out out --text {options}", names) for options, names in (
        ("text.txt --layer 2", "--layer"),
        ("text.txt --at 15", "--at"),
        ("text.txt --mem-len 390", "memory 406"),
        ("none.txt", "none.txt"),
    )),
    ("attention {split} --text text.txt --out out --head 2", "--head"),
    ("spans {ring}", "artefact"),
    ("spans {run}", "model.span"),
    ("spans {spans} --out spans.jpg", ".png"),
    ("runs folder", "folder metrics.jsonl", {"folder/a": ""}),
    ("demo --out text.txt/demo", "text.txt --out"),
    ("demo --out out --steps 3", "--train"),
]  # fmt: skip

RTX = "build {shift} --out out --flavour rtx --compute-capability 8.6,12.0"
BUILD = [
    ("build nosuch --out out", "nosuch artefact"),
    ("build {shift} --out out --flavour rtx", "--compute-capability"),
    ("build {shift} --out out --flavour rtx --compute-capability 9.0", "9.0 8.6"),
    ("build {shift} --out out --compute-capability 8.6", "--compute-capability --flavour"),
    ("build {shift} --out out --timing-cache /nowhere/cache", "/nowhere/cache"),
    ("build {shift} --out out --timing-cache /", "--timing-cache folder"),
    ("build {shift} --out out --attention plugin --hardware ampere-plus", "--hardware plugin"),
    ("build {shift} --out out --attention plugin --timing-cache c", "--timing-cache --attention"),
    ("build {shift} --out out --attention plugin --token-batch 1:2:4", "--token-batch"),
    ("build {ring} --out out --flavour rtx --compute-capability 8.6", "--target"),
    *((f"{RTX} {options}", names) for options, names in (
        ("--attention plugin", "--attention TensorRT-RTX"),
        ("--refit", "--refit --flavour"),
        ("--version-compatible", "--version-compatible --flavour"),
        ("--hardware ampere-plus", "--hardware --flavour"),
        ("--batch 4:2:1", "--batch"),
        ("--tokens 9", "--tokens"),
    )),
]  # fmt: skip

# Every command that writes a folder, and the kind of the folder.
FOLDERS = [
    ("train tiny", RUN),
    ("export {run}", ARTEFACT),
    (f"import {BYTES}", IMPORTED),
    ("prepare text --train text.txt --vocab byte", DATASET),
    ("prepare enwik8 --from enwik8.zip --unverified", DATASET),
    ("build {shift} --flavour rtx --compute-capability 8.6", ENGINE),
    ("refit {ring} {ring}", ENGINE),
    ("web {ring}", SITE),
    ("polygraphy {ring}", POLYGRAPHY),
    ("attention {run} --text text.txt", PICTURES),
]


def earlier(kind: Kind, folder: str) -> Files:
    """An earlier result of a command, as far as `--force` is concerned, with two other files."""
    files: Files = dict.fromkeys([f"{folder}/{name}" for name in (kind.marker, *kind.proofs, "CNAME")], "{}")
    return {**files, f"{folder}/.git/HEAD": "ref"}


REPLACE = [
    *((f"{command} --out out --force", "out '.git' 'CNAME'", earlier(kind, "out"))
      for command, kind in FOLDERS),
    *((f"{command} --out {{ring}}/inside", "ring/inside artefact")
      for command, _ in FOLDERS),
    ("export {run} --out {trained}/inside", "run/inside run"),
    ("export {run} --out a --triton models --force", "models/a '.git' 'CNAME'",
     earlier(SERVER_MODEL, "models/a")),
    ("demo --out {ring}/inside", "ring/inside artefact"),
]  # fmt: skip

ROWS = [*TRAIN, *EXPORT, *IMPORT, *PREPARE, *LOOK, *BUILD, *REPLACE]


@pytest.fixture(scope="module")
def place(
    run: Path,
    artefacts: dict[str, Path],
    make_run: Callable[..., Path],
    chain: Callable[[str], Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], Path]:
    """`place(name)`: what {name} is in a command. Commands must leave it as it is."""
    folder = tmp_path_factory.mktemp("places")

    @functools.cache
    def make(name: str) -> Path:
        if name == "run":
            return run
        if name in artefacts:
            return artefacts[name]
        if name in ("ids", "trained", "data"):
            made = chain("ids")
            return {"ids": made.artefact, "trained": made.run, "data": made.dataset}[name]
        if name == "spans":
            return make_run(**ARCHITECTURES["adaptive-span"])
        if name == "split":
            return make_run(**ALL_ATTENTION, sublayers="head-split", heads=4)
        if name == "ptb":
            source = make_source(folder / "corpus", "penn-treebank", "tar.gz")
            prepare("penn-treebank", source, folder / name, unverified=True)
        elif name == "reversed":
            shutil.copytree(run, folder / name)
            vocab = json.loads((run / "vocab.json").read_text())
            vocab["symbols"].reverse()
            (folder / name / "vocab.json").write_text(json.dumps(vocab))
        return folder / name

    return make


def commands(group: click.Group, *path: str) -> Iterator[tuple[str, click.Command]]:
    """Every command with its name."""
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, *path, name)
        else:
            yield " ".join((*path, name)), command


def outside(kind: click.ParamType) -> list[object]:
    """Values that an option of this type refuses; none if the type is neither a number nor a choice."""
    if isinstance(kind, click.types.IntParamType):
        assert isinstance(kind, click.IntRange), "a number has a range"
        ends = [kind.min is not None and kind.min - 1, kind.max is not None and kind.max + 1]
        return ["many", 1.5, *(end for end in ends if end is not False)]
    if isinstance(kind, click.types.FloatParamType):
        assert isinstance(kind, Number), "click's own type accepts nan"
        return ["many", *map(float, ("nan", "inf", "-inf", "1e400", "1e300"))]
    return ["sideways"] if isinstance(kind, click.Choice) else []


@pytest.mark.parametrize(("name", "command"), list(commands(main)))
def test_an_option_refuses_what_is_out_of_its_range(name: str, command: click.Command) -> None:
    for option in command.params:
        for value in outside(option.type):  # refused before anything is opened
            refused(xl(f"{name} {name_of(option)}={value}"), name_of(option))


@pytest.mark.parametrize(
    ("command", "records"),
    [
        ("train", [TrainConfig]),
        ("import", [Settings]),
        ("build", [BuildOptions]),
        ("generate", [Sampler]),
        ("serve", [EngineSettings, Limits, StoreSettings]),
    ],
)
def test_an_option_has_the_range_of_its_field(command: str, records: list[type]) -> None:
    types = {name_of(option): option.type for option in main.commands[command].params}
    for each in (each for record in records for each in declared(record)):
        kind, name, allowed = types[each.option.name], each.option.name, each.range
        if isinstance(kind, click.IntRange) and name != "--top-k":  # 0 is for all tokens
            found = (kind.min or 0) * each.option.unit, (kind.max or math.inf) * each.option.unit
            assert found == (allowed.least, math.inf if allowed.most == ANY.most else allowed.most), name
        elif isinstance(kind, click.FloatRange):
            assert getattr(kind, "allowed", None) == allowed, name
        elif isinstance(kind, click.Choice):
            assert tuple(kind.choices) == get_args(each.kind)


def tree(folder: Path) -> dict[str, bytes]:
    paths = sorted(folder.rglob("*"))
    return {str(path): path.read_bytes() if path.is_file() else b"" for path in paths}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0].replace(str(DATA), "")[:100])
def test_bad_input_is_one_sentence_and_changes_nothing(
    row: tuple[Any, ...], place: Callable[[str], Path], text: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    command, names, files = (*row, {})[:3]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(text[:400], encoding="utf-8")
    (tmp_path / "long.txt").write_text(text[:20_000], encoding="utf-8")
    np.save("ids.npy", np.arange(9))
    np.savez("a.npz", ids=np.arange(9))
    make_source(tmp_path, "enwik8", "zip")
    arguments = [word.format_map(Places(place)) for word in shlex.split(command)]
    if "copy" in arguments:
        shutil.copytree(place("run"), "copy")
    for name, content in {**BAD_TEXTS, **files}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if content is None:
            path.unlink()
        else:
            path.write_bytes(content.encode() if isinstance(content, str) else content)
    before = tree(tmp_path)
    refused(xl(*arguments), *names.split())
    assert tree(tmp_path) == before


class Places(dict[str, Path]):
    """The paths of `place`, made when they are asked for."""

    def __init__(self, place: Callable[[str], Path]) -> None:
        super().__init__()
        self.place = place

    def __missing__(self, name: str) -> Path:
        return self.place(name)

"""What commands refuse: exit code 2, one sentence that says what to do, and nothing written.

A row is a command, words of its sentence, separated by " … ", and files that it needs in the working folder:
their content, or None for one that is removed. `copy` is a copy of a run there; names in braces are the
artefacts, runs and data sets of `place`.
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


def setting(content: str, words: str) -> tuple[str, str, Files]:
    """A row whose settings.json has this content."""
    return SETTINGS, words, {"settings.json": content}


def checkpoint(words: str, source: str = "source", **files: bytes) -> tuple[str, str, Files]:
    """A row that describes files which are no checkpoint."""
    named: Files = {f"source/{name.replace('__', '.')}": content for name, content in files.items()}
    return f"import {source} --describe", words, named


def variant(name: str, options: str, words: str) -> tuple[str, str]:
    """A row that imports a checkpoint of tests/data/variants."""
    folder = VARIANTS / name
    return f"import {folder} --vocab {folder}/vocab.txt --describe {options}", words


TRAIN = [
    ("train tiny", "either --out RUN … or --resume RUN"),
    ("train tiny --out out --resume {trained}", "either --out RUN … or --resume RUN"),
    ("train tiny --resume {trained}", "leave out CONFIG and --force"),
    ("train --resume {trained} --force", "leave out CONFIG and --force"),
    ("train --show tiny --data data --min-count 2", "--min-count is 2 … leave out --min-count"),
    ("train wt103-bas --out out", "wt103-bas is neither … wt103-base … --list"),
    ("train mine.json --out out", "unknown key 'stepz'", {"mine.json": '{"stepz": 1}'}),
    # texts and data sets
    ("train tiny --text none.txt --out out", "none.txt could not be read"),
    ("train tiny --text few.txt --out out", "too few for 8 lanes"),
    ("train tiny --text latin.txt --out out", "line 1 of  … latin.txt is not UTF-8 (byte 0xff)"),
    ("train tiny --text ids.npy --out out", "is a npy file … `xl-export prepare tokens`"),
    ("train tiny --text {data} --out out", "`xl-export train --data"),
    ("train tiny --text folder --out out", "`xl-export prepare text` … prepare NAME", {"folder/a": ""}),
    ("train tiny --data nosuch --out out", "nosuch does not exist; give a prepared dataset."),
    ("train tiny --text {trained}/test.npy --out {trained} --force", "which would be replaced and deleted"),
    ("train tiny --data {data} --vocab byte --out out", "--vocab is byte … its own vocabulary"),
    ("train wt103-base --out out", "is for wikitext-103 … xl-export prepare wikitext-103 … --text FILE"),
    ("train enwik8-base --data {ptb} --out out", "ptb is penn-treebank and the configuration is for enwik8"),
    # vocabularies
    ("train --text text.txt --vocab words --out out", "'words', and word was probably meant"),
    ("train --text text.txt --vocab {data}/vocab.json --out out", "'The', word 1 of the text, is not among"),
    # resuming
    ("train --resume none", "none does not exist; give a run."),
    ("train --resume {ring}", "is an artefact already … give the run"),
    ("train --resume {data}", "is a dataset; give a run … --data"),
    ("train --resume {run}", "imported or copied in part: it has no training.safetensors"),
    ("train --resume {trained} --steps 3", "--steps is 3 … larger"),
    *((f"train --resume {{trained}} {o}", f"leave out {o.split()[0].split('=')[0]}") for o in (
        "--seed 1", "--vocab byte", "--max-size 9", "--set seed=2"
    )),
    # plans and new runs from old ones
    ("train --text odd.txt --minutes 3 --steps 2 --out out", "leave out --minutes, or --steps"),
    ("train tiny --minutes 3 --out out", "--minutes is for a new run"),
    ("train tiny --from {run} --text odd.txt --out out", "--from is for a new run"),
    ("train --from {run} --out out", "give --text FILE, or --data"),
    ("train --from {run} --text odd.txt --vocab byte --out out", "--from uses the vocabulary"),
    ("train --from {run} --text odd.txt --steps 2 --out out", "'§', character 1 of the text"),
    # processes; refused before anything is read
    *((f"train --{source} --processes 2 --out out", "leave out --processes, or give a CONFIG")
      for source in ("text few.txt", "data nosuch", "from {run} --text odd.txt")),
    ("train tiny --text long.txt --out out --processes 9", "batch is 8 with 9 processes … a multiple of 9"),
    ("train tiny --text long.txt --out out --processes 3", "batch is 8 with 3 processes … a multiple of 3"),
    # keys
    ("train --show tiny --set seed=2 --seed 3", "seed is given by --set and by --seed"),
    ("train --show tiny --set steps=10 --set schedule.warmup_steps=100", "steps, which is 10"),
    ("train tiny --set sead=2 --out out", "'seed' was probably meant"),
]  # fmt: skip

EXPORT = [
    ("export nosuch --out out", "nosuch does not exist; give a run."),
    ("export {ring} --out out", "is an artefact already; check it with"),
    ("export {data} --out out", "is a dataset; give a … `xl-export train --data"),
    ("export copy --out out", "model.safetensors is missing or damaged", {"copy/model.safetensors": None}),
    ("export copy --out out", "vocab.json has 256 symbols", {"copy/vocab.json": '{"kind": "byte"}'}),
    ("export copy --out out", "is not a run", {"copy/config.json": None}),
    *((f"export {{run}} --out out {options}", words) for options, words in (
        ("--text text.txt", "a text was given to measure a reduced precision on"),
        # engines
        ("--target tensorrt --precision int8-stored", "or another target"),
        ("--target tensorrt --memory-precision fp16", "leave it out"),
        ("--target tensorrt --memory hidden", "engines have ring or shift memory … leave "),
        ("--target tensorrt --memory ring --mask full", "where segments are cut … leave out --memory"),
        ("--target tensorrt --memory ring --mem-len 0", "the model has no memory … which is then shift"),
        ("--target tensorrt --memory ring --exporter trace", "--exporter trace writes across the end"),
        ("--attention-as operators", "--attention-as operators is for --target tensorrt"),
        ("--target web --attention-as node", "--attention-as is not for --target web"),
        ("--attention-as node --memory shift", "memory is shift, expected ring; leave out --attention-as"),
        ("--attention-as node --single-file", "the weights are stored as single-file, expected external"),
        ("--exporter trace --target tensorrt --attention-as node", "is for a graph that is written"),
        ("--rows 1", "--rows and --tokens are for a traced graph; give --exporter trace"),
        *((f"--exporter trace --target tensorrt --precision {p}", "a traced step for TensorRT has")
          for p in ("int8", "int4")),
        # memory in int8
        ("--memory-precision int8 --memory shift", "this memory is shift; give memory in fp16"),
        ("--memory-precision int8 --target web", "WebGPU has no numbers of 8 bits"),
        ("--memory-precision int8 --exporter trace", "a traced step has no scales for memory in int8"),
        ("--target web --exporter trace", "--target web writes … leave one of them out"),
        # single files
        ("--ort --single-file", "leave out --single-file"),
        ("--ort --target tensorrt", "--ort is for --target onnxruntime"),
    )),
]  # fmt: skip

IMPORT = [
    (f"import {BYTES}", "give --out RUN … --describe"),
    (f"import {BYTES} --describe --out x", "--describe writes nothing and --out names the run x"),
    (f"import {BYTES}/missing.pt --describe", "missing.pt does not exist"),
    (f"import {DATA} --describe", "has no checkpoint by the names model.pt"),
    (f"import {BYTES}/cache.pt --describe", "cache.pt is of no format … kimiyoung: model.pt"),
    (f"import {BYTES}/expected.npz --describe", "is of no format"),
    (f"import {BYTES} --describe --ramp 32", "ramp is set (option) … only mem_len, segment, mask, clamp_len"),
    (f"import {BYTES} --describe --mem-len 0", "mem_len is 0 and the mask is same-length … --mask full"),
    (f"import {BYTES} --describe --vocab {BYTES}/model.pt", "model.pt is not a vocabulary"),
    (f"import {BYTES} --describe --vocab {DATA}/kimiyoung-wt103-large/cache.pt", "500 symbols and the"),
    (f"import {DATA}/adaptive-span-enwik8 --describe --mem-len 5", "mem_len is set … only segment, ramp"),
    (f"import {VARIANTS}/kimiyoung-shaw --describe", "has no cache.pt … --vocab FILE"),
    (f"import {BYTES} --out {{run}} --force", "no import.json"),
    ("import {ring} --describe", "is an artefact; give the run that it was made of"),
    variant("kimiyoung-absolute", "--mem-len 4", "attn_type 2 with memory adds … --mem-len 0 --mask full"),
    variant("kimiyoung-per-layer", "--segment 13", "segment is 13 and this model has 12 positions"),
    variant("kimiyoung-per-layer", "--clamp-len 3", "clamp_len is set"),
    setting("{", "is not valid JSON"),
    setting('{"attn_span": 3}', "unknown key 'attn_span' … segment"),
    setting('{"tgt_len": 3, "segment": 4}', "tgt_len is 3 and segment 4; give one of them"),
    setting('{"same_length": true, "mask": "full"}', "same_length is True and mask 'full'"),
    setting('{"block_sz": "3"}', "'segment' … expected a whole number"),
    checkpoint("model.pt is empty", model__pt=b""),
    *(checkpoint("model.pt is no checkpoint", "source/model.pt", model__pt=text)
      for text in (b"Some notes on it\n", b"heading of my notes\n", b"# Notes\n", "Ünicode\n".encode())),
    checkpoint("has pytorch_model.bin and no config.json", pytorch_model__bin=b"0"),
    ("import source/model.ckpt-0 --describe", "a TensorFlow check", {"source/model.ckpt-0.index": b"0"}),
    ("import source --describe", "is a TensorFlow checkpoint and TensorFlow is not … make an .npz file of it",
     {"source/model.ckpt-0.index": b"0", "source/model.ckpt-0.meta": b"0"}),
    ("import source/model.ckpt-0.data-00000-of-00001 --describe", "is a TensorFlow checkpoint",
     {"source/model.ckpt-0.data-00000-of-00001": b"0"}),
    ("import source/checkpoint --describe", "a-1 is a TensorFlow",
     {"source/checkpoint": 'model_checkpoint_path: "/x/a-1"', "source/a-1.index": b"0"}),
]  # fmt: skip

PREPARE = [
    ("prepare token", "no command 'token'; tokens was probably meant"),
    ("prepare enwik8 --from enwik8.zip --out out", "expected 100,000,000 bytes, found 5, … --unverified"),
    ("prepare text8 --from enwik8.zip --out out", "enwik8.zip has no text8, which text8 needs"),
    ("prepare enwik8 --from none.zip --out out", "none.zip does not exist … --download"),
    ("prepare tokens --train n.npy --vocab-size 3 --out out", "--train is … does not exist"),
    ("prepare tokens --train text.txt --vocab-size 9 --out out", "as word 1 … `xl-export prepare text`"),
    ("prepare tokens --train {data} --vocab-size 9 --out out", "is no file of token ids"),
    ("prepare text --train text.txt --vocab char --max-size 9 --out out", "of words and max_size for"),
    ("prepare vocab --kind bpe --text text.txt --out v.json", "give --size"),
    ("prepare vocab --kind sentencepiece --size 300 --text text.txt --out v.json", "ends in .model"),
    ("prepare vocab --kind word --text text.txt --out kept.json", "exists already", {"kept.json": ""}),
]  # fmt: skip

LOOK = [
    ("check nosuch", "nosuch does not exist; give a run, an artefact or an engine."),
    *((f"{command} {{data}}", "is a dataset; give a … train --data") for command in ("check", "info")),
    ("eval {run} --text {data}", "another vocabulary than the model"),
    ("eval {ids} --text text.txt", "text.txt: … word 1 of the text, is not among the numbers of … 12 tokens"),
    ("generate {ids} --prompt a", "'a', word 1 … not among the numbers of this model's 12"),
    ("generate {ids} --prompts text.txt", "line 1 of text.txt: 'The', word 1"),
    ("web nosuch --out out", "nosuch does not exist; give an artefact."),
    ("web {data} --out out", "is a dataset; give a … `xl-export train --data"),
    *((f"recl {{run}} --text text.txt --lengths {options}", words) for options, words in (
        ("8,4", "--lengths is '8,4' … ascending"),
        ("8,18", "--lengths goes to 18 … sees more than 17 … --mem-len"),
        ("4,8 --positions 393", "400 tokens, 392 of them after 8 others … 393 are asked for"),
        ("4,8 --r 0", "--r is 0 … above 0"),
        ("4,8 --out recl.txt", "--out is recl.txt … .json"),
        ("4,8 --out /dev/null/recl.json", "could not be written"),
        ("4,8 --plot recl.svg", "--plot is recl.svg … .png"),
    )),
    ("recl {ring} --text text.txt --lengths 4,8 --mem-len 30", "--mem-len is 30 … exported with 16"),
    ("recl {run} {reversed} --text text.txt --lengths 4,8", "reversed has another vocabulary"),
    *((f"attention {{run}} --out out --text {options}", words) for options, words in (
        ("text.txt --layer 2", "--layer is 2 … expected 0 to 1"),
        ("text.txt --at 15", "--at is 15 … expected 16 to 384"),
        ("text.txt --mem-len 390", "the text has 400 tokens, expected at least 406 for a memory of 390"),
        ("none.txt", "none.txt could not be read"),
    )),
    ("attention {split} --text text.txt --out out --head 2", "--head is 2; expected 0 to 1, those"),
    ("spans {ring}", "is an artefact"),
    ("spans {run}", "the model has no learned spans"),
    ("spans {spans} --out spans.jpg", "ends in .png"),
    ("runs folder", "neither a run nor a folder of runs … metrics.jsonl", {"folder/a": ""}),
    ("demo --out text.txt/demo", "text.txt is a file, not a folder; give another --out"),
    ("demo --out out --steps 3", "give --train too"),
]  # fmt: skip

RTX = "build {shift} --out out --flavour rtx --compute-capability 8.6,12.0"
BUILD = [
    ("build nosuch --out out", "nosuch does not exist; give an artefact."),
    ("build {shift} --out out --flavour rtx", "--compute-capability is not given … such as 8.6,8.9,12.0"),
    ("build {shift} --out out --flavour rtx --compute-capability 9.0", "has 9.0 … 7.5, 8.0, 8.6"),
    ("build {shift} --out out --compute-capability 8.6", "is for --flavour rtx"),
    ("build {shift} --out out --timing-cache /nowhere/cache", "/nowhere/cache could not be written"),
    ("build {shift} --out out --timing-cache /", "--timing-cache is /, which is a folder"),
    ("build {shift} --out out --attention plugin --hardware ampere-plus", "embeds a kernel"),
    ("build {shift} --out out --attention plugin --timing-cache c", "--timing-cache … --attention native"),
    ("build {shift} --out out --attention plugin --token-batch 1:2:4", "takes one size"),
    ("build {ring} --out out --flavour rtx --compute-capability 8.6", "across its end … --target tensorrt"),
    *((f"{RTX} {options}", words) for options, words in (
        ("--attention plugin", "takes no plugins from Python … --attention native"),
        ("--refit", "--refit is for --flavour tensorrt"),
        ("--version-compatible", "--version-compatible is for --flavour tensorrt … leave it out"),
        ("--hardware ampere-plus", "--hardware is for … leave it out"),
        ("--batch 4:2:1", "--batch is 4:2:1 … least:usual:most in ascending order … such as 1:4:16"),
        ("--tokens 9", "--tokens is 9 … 1 to 8"),
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
    *((f"{command} --out out --force", "out also holds '.git' and 'CNAME'", earlier(kind, "out"))
      for command, kind in FOLDERS),
    *((f"{command} --out {{ring}}/inside", "ring/inside is inside of … which is an artefact")
      for command, _ in FOLDERS),
    ("export {run} --out {trained}/inside", "which is a run"),
    ("export {run} --out a --triton models --force", "models/a also holds '.git' and 'CNAME'",
     earlier(SERVER_MODEL, "models/a")),
    ("demo --out {ring}/inside", "which is an artefact"),
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
    command, words, files = (*row, {})[:3]
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
    refused(xl(*arguments), *words.split(" … "))
    assert tree(tmp_path) == before


class Places(dict[str, Path]):
    """The paths of `place`, made when they are asked for."""

    def __init__(self, place: Callable[[str], Path]) -> None:
        super().__init__()
        self.place = place

    def __missing__(self, name: str) -> Path:
        return self.place(name)

"""`build.json` of an engine: what a stranger's may hold is refused or read, and nothing else happens."""

from __future__ import annotations

import dataclasses
import json
import random
import shlex
from pathlib import Path
from typing import Any

import pytest

from runtimes.base.errors import ArtefactError, ConfigError
from runtimes.contract.engine import (
    Gpu,
    Profile,
    load_engine,
    rebuild_command,
    refuse_elsewhere,
    save_engine,
)
from runtimes.contract.spec import BUILD
from runtimes.sessions.open import describe
from runtimes.tasks.describe import detail_lines, summary_lines
from tests.fake_gpu import make_engine
from tests.sealing import identity

MUTATIONS = 100


@pytest.fixture
def engine(artefacts: dict[str, Path], tmp_path: Path) -> Path:
    return make_engine(artefacts["shift"], tmp_path / "engine")


def test_facts_survive_the_file(engine: Path) -> None:
    facts, _ = load_engine(engine)
    save_engine(engine, facts)
    assert load_engine(engine)[0] == facts


def test_an_engine_is_identified_by_the_hash_of_its_file(engine: Path) -> None:
    assert load_engine(engine)[0].identity == identity(engine / BUILD)


@pytest.mark.parametrize(
    "changes",
    [
        {"compute_capabilities": ()},
        {"compute_capabilities": ("8.9; rm",)},
        {"schema": 0},
        {"profiles": (Profile(name="token", batch=(1, 1, 1), tokens=(1, 1, 1)),)},
    ],
)
def test_impossible_facts_are_refused_despite_a_valid_digest(engine: Path, changes: dict[str, Any]) -> None:
    facts, _ = load_engine(engine)
    save_engine(engine, dataclasses.replace(facts, **changes))
    with pytest.raises(ArtefactError, match="build the engine again"):
        load_engine(engine)


def test_an_engine_of_a_newer_version_is_refused(engine: Path) -> None:
    facts, _ = load_engine(engine)
    save_engine(engine, dataclasses.replace(facts, schema=2))
    with pytest.raises(ArtefactError, match=r"has schema 2, and this version reads up to 1; update"):
        load_engine(engine)


def test_an_engine_of_another_artefact_is_refused(engine: Path) -> None:
    facts, _ = load_engine(engine)
    save_engine(engine, dataclasses.replace(facts, artefact="0" * 64))
    with pytest.raises(
        ArtefactError, match=r"was built from the artefact 000000000000, and its spec\.json is of"
    ):
        load_engine(engine)


@pytest.mark.parametrize(
    ("batch", "tokens"),
    [((2, 1, 1), (1, 1, 1)), ((0, 1, 1), (1, 1, 1)), ((1, 1), (1, 1, 1)), ((1,) * 3, (9, 1, 1))],
)
def test_profiles_that_do_not_rise_are_refused(batch: tuple[int, ...], tokens: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="least:usual:most"):
        Profile(name="segment", batch=batch, tokens=tokens)


def test_ampere_plus_engines_are_refused_before_ampere(engine: Path) -> None:
    facts = dataclasses.replace(load_engine(engine)[0], hardware="ampere-plus")
    refuse_elsewhere(facts, engine, version=facts.version, gpu=Gpu(name="New", compute_capability="12.0"))
    with pytest.raises(ArtefactError, match=r"8\.0 and up, and this one is Old \(7\.5\)"):
        refuse_elsewhere(facts, engine, version=facts.version, gpu=Gpu(name="Old", compute_capability="7.5"))


def test_the_rebuild_command_has_every_option(engine: Path) -> None:
    facts = dataclasses.replace(
        load_engine(engine)[0], hardware="same-capability", refit=True, attention="plugin"
    )
    assert rebuild_command(engine, facts) == (
        f"`xl-export build ARTEFACT --out {engine} --flavour tensorrt --attention plugin --batch 1:1:16 "
        "--token-batch 1:1:2 --tokens 8 --hardware same-capability --refit --force`"
    )


def test_the_command_is_one_for_a_shell(artefacts: dict[str, Path], tmp_path: Path) -> None:
    folder = make_engine(artefacts["shift"], tmp_path / "my engine")
    words = shlex.split(rebuild_command(folder, load_engine(folder)[0]).strip("`"))
    assert words[words.index("--out") + 1] == str(folder)


def test_facts_without_end_are_not_read(engine: Path) -> None:
    with (engine / BUILD).open("ab") as stream:
        stream.truncate(1 << 40)  # sparse
    with pytest.raises(ArtefactError, match=r"has more than 1048576 bytes; build the engine again"):
        load_engine(engine)


def test_mutated_facts_are_read_or_refused(engine: Path) -> None:
    draw, whole = random.Random(0), (engine / BUILD).read_bytes()
    refused = []
    for _ in range(MUTATIONS):
        data = bytearray(whole)
        for _ in range(draw.randint(1, 4)):
            at = draw.randrange(len(data))
            data[at : at + draw.choice((0, 1, 1, 30))] = draw.choice(
                (b"", b"9" * 40, b"[", b'"', b"null", bytes([draw.randrange(256)]))
            )
        (engine / BUILD).write_bytes(data)
        try:
            facts = describe(engine)
            print(*summary_lines(facts, engine), *detail_lines(facts))
        except ArtefactError as error:
            refused.append(str(error))
    assert len(refused) > MUTATIONS * 0.8
    assert not any("\n" in message for message in refused)
    document = json.loads(whole)
    for key in document.keys() - {"schema"}:
        (engine / BUILD).write_text(
            json.dumps({name: value for name, value in document.items() if name != key})
        )
        with pytest.raises(ArtefactError):
            load_engine(engine)

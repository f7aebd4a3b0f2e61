"""The settings that a model recommends travel with it, and change neither its identity nor its streams."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from runtimes import Sampler, generate, load_memory, open_session, save_memory
from runtimes.base.files import read_json
from runtimes.contract.sampling import SAMPLING, read_sampling, write_sampling
from tests.commands import refused, xl

OWN = Sampler(temperature=0.6, top_k=5, repetition_penalty=1.1)


@pytest.fixture
def artefact(artefacts: dict[str, Path], tmp_path: Path) -> Path:
    """A copy of an artefact whose settings a test may change."""
    return shutil.copytree(artefacts["ring"], tmp_path / "artefact")


def test_settings_survive_writing_and_reading(tmp_path: Path) -> None:
    for sampler in (Sampler(), OWN, Sampler(temperature=0, top_p=0.5, min_p=0.1, presence_penalty=-1)):
        write_sampling(tmp_path, sampler)
        assert read_sampling(tmp_path) == sampler
    (tmp_path / SAMPLING).unlink()
    assert read_sampling(tmp_path) == Sampler()


def test_export_writes_the_settings_of_the_recipe(make_run: Callable[..., Path], tmp_path: Path) -> None:
    from xl_export.artefact.export import export

    run = shutil.copytree(make_run(), tmp_path / "run")
    write_sampling(run, OWN)
    assert open_session(run).sampler == OWN
    assert open_session(export(run, tmp_path / "artefact")).sampler == OWN


def test_an_import_of_a_run_takes_over_its_settings(make_run: Callable[..., Path], tmp_path: Path) -> None:
    """One file of a run has them, and the configuration in it works elsewhere."""
    from trainer.run.config import TrainConfig

    run = shutil.copytree(make_run(), tmp_path / "run")
    write_sampling(run, OWN)
    assert xl("import", run, "--out", tmp_path / "imported").exit_code == 0
    assert read_sampling(tmp_path / "imported") == OWN
    assert "sampling" not in read_json(tmp_path / "imported" / "config.json")
    assert TrainConfig.load(tmp_path / "imported" / "config.json").sampling == OWN


def test_set_keeps_the_identity_and_the_saved_streams(artefact: Path, tmp_path: Path) -> None:
    before = open_session(artefact)
    memory = before.start(1)
    before.predict(np.array([[1, 2, 3]]), memory)
    save_memory(memory, tmp_path / "stream")
    assert xl("set", artefact, "--temperature", "0.6", "--top-k", "5").exit_code == 0
    assert xl("set", artefact, "--repetition-penalty", "1.1").exit_code == 0
    after = open_session(artefact)
    assert (before.sampler, after.sampler) == (Sampler(), OWN)
    assert after.identity == before.identity
    assert load_memory(tmp_path / "stream", after).positions.tolist() == [3]
    assert xl("set", artefact, "--reset", "--top-k", "0", "--top-p", "0.5").exit_code == 0
    assert read_sampling(artefact) == Sampler(top_p=0.5)


def test_set_reset_repairs_a_damaged_file(artefact: Path) -> None:
    (artefact / SAMPLING).write_text("{")
    refused(xl("set", artefact, "--top-p", "0.5"), f"`xl-export set {artefact} --reset`")
    assert xl("set", artefact, "--reset").exit_code == 0
    assert read_sampling(artefact) == Sampler()


def test_an_explicit_setting_wins_in_generate(artefact: Path, text: str) -> None:
    write_sampling(artefact, OWN)

    def printed(*options: str) -> str:
        ended = xl("generate", artefact, "--prompt", text[:10], "--tokens", "30", "--seed", "1", *options)
        return ended.stdout.removesuffix("\n").removeprefix(text[:10])

    def drawn(**changes: Any) -> str:
        session = open_session(artefact)
        sampler = session.sampler.replaced(**changes)
        return "".join(p.text for p in generate(session, text[:10], max_tokens=30, seed=1, sampler=sampler))

    assert printed() == drawn()
    assert printed("--temperature", "2", "--top-k", "0") == drawn(temperature=2.0, top_k=0) != drawn()
    assert printed("--temperature", "0") == drawn(temperature=0.0)


def test_the_server_draws_as_the_model_recommends_unless_asked_otherwise() -> None:
    plan = pytest.importorskip("xl_export.serve.http.openai.plan")
    session = SimpleNamespace(sampler=OWN, vocab=SimpleNamespace(kind="char", size=9))

    def sampler(**fields: Any) -> Sampler:
        return plan.sampling_params_of(plan.SamplingFields(**fields), session, 3).sampler

    assert sampler() == OWN
    assert sampler(temperature=0) == OWN.replaced(temperature=0)
    assert sampler(top_k=-1) == sampler(top_k=0) == OWN.replaced(top_k=0)
    assert sampler(repetition_penalty=1, top_k=2, temperature=1) == Sampler(top_k=2)

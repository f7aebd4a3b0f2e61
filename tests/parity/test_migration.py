"""C++ and JavaScript continue a stream on another model, or refuse it, exactly as Python does."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

import runtimes
from runtimes.base.tensors_file import read_tensors, write_tensors
from tests.parity.operations import Program
from xl_export.artefact.export import export

MODELS = {"fp32": {}, "fp16": {"memory_precision": "fp16"}, "int8": {"memory_precision": "int8"}}
MOVES = [
    ("fp32", "fp16"),
    ("fp32", "int8"),
    ("fp16", "fp32"),
    ("int8", "fp32"),
    ("int8", "fp16"),
    ("fp16", "int8"),
]
TOKENS = [[5, 9, 2, 7, 1], [3, 3, 8, 0, 4]]


@pytest.fixture(scope="module")
def models(run: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Artefacts of one run with memory in each precision, and one of a fine-tuned run."""
    from safetensors.numpy import load_file, save_file

    folder = tmp_path_factory.mktemp("models")
    made = {name: export(run, folder / name, **options) for name, options in MODELS.items()}  # type: ignore[arg-type]
    file = Path(shutil.copytree(run, folder / "run")) / "model.safetensors"
    save_file({name: array * np.float32(1.01) for name, array in load_file(file).items()}, file)
    return {**made, "tuned": export(folder / "run", folder / "tuned", memory_precision="fp16")}


@pytest.mark.parametrize("language", ["cpp", "javascript"])
def test_a_stream_moves_as_in_python(
    language: str, request: pytest.FixtureRequest, models: dict[str, Path], tmp_path: Path
) -> None:
    entry_point: Program = request.getfixturevalue(language)
    sessions = {name: runtimes.open_session(folder) for name, folder in models.items()}
    files = {}
    for name in MODELS:
        memory = sessions[name].start(2)
        for seed in range(4):  # past the memory length
            tokens = np.random.default_rng(seed).integers(20, size=(2, 8))
            sessions[name].step(tokens, memory)
        # Numbers below the normal ones of fp16, and halfway between two of them, are among these.
        for array in memory.tensors.values():
            if array.dtype == np.float32 and array.shape[-1] > 1:
                sizes = np.outer(2.0 ** np.arange(-30, 5), [1 + 2**-11, -1 - 3 * 2**-11, 1, -0.0])
                array.reshape(-1)[: sizes.size] = sizes.ravel()
        files[name] = tmp_path / name
        runtimes.save_memory(memory, files[name])
    for begun, continued in [*MOVES, ("fp32", "tuned"), ("int8", "tuned")]:
        session, adopt = sessions[continued], continued == "tuned"
        entry_point.ask("open", model=str(models[continued]))
        given = {"stream": "a", "file": str(files[begun])}
        if adopt:
            assert "other weights" in entry_point.ask("load", **given)["error"]
            given["adopt"] = True
        assert "error" not in entry_point.ask("load", **given)
        again, expected = tmp_path / "again", tmp_path / "expected"
        memory = runtimes.load_memory(files[begun], session, adopt=adopt)
        runtimes.save_memory(memory, expected)
        entry_point.ask("save", stream="a", file=str(again))
        (arrays, facts), (right, facts_of_python) = read_tensors(again), read_tensors(expected)
        facts.pop("furthest", None)
        assert facts == facts_of_python
        assert ("adopted" in facts) == adopt
        assert arrays.keys() == right.keys()
        for name, array in right.items():
            assert arrays[name].dtype == array.dtype
            assert arrays[name].tobytes() == array.tobytes(), (begun, continued, name)
        logits = entry_point.ask("step", stream="a", tokens=TOKENS)["logits"]
        assert np.abs(session.step(np.array(TOKENS), memory)[0].ravel() - logits).max() < 1e-3


@pytest.mark.parametrize("language", ["cpp", "javascript"])
def test_numbers_that_are_not_finite_are_refused(
    language: str, request: pytest.FixtureRequest, models: dict[str, Path], tmp_path: Path
) -> None:
    entry_point: Program = request.getfixturevalue(language)
    for name in MODELS:
        session, path = runtimes.open_session(models[name]), tmp_path / name
        runtimes.save_memory(session.start(1), path)
        arrays, facts = read_tensors(path)
        entry_point.ask("open", model=str(models[name]))
        for value in (np.inf, -np.nan):
            floats = next(key for key, array in arrays.items() if array.dtype.kind == "f")
            spoilt = {**arrays, floats: np.full_like(arrays[floats], value)}
            with path.open("wb") as stream:
                write_tensors(stream, spoilt, {key: text for key, text in facts.items() if key != "sha256"})
            with pytest.raises(runtimes.UserError, match="not finite"):
                runtimes.load_memory(path, session)
            assert "not finite" in entry_point.ask("load", stream="a", file=str(path))["error"], (name, value)

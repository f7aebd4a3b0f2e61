"""The edge part on an emulated ARM processor gives the answers of the host and of PyTorch.

Artefacts are exported here. One emulated process for each processor runs all commands over them. Nothing is
said about speed: an emulator has none of its own.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.architectures import ARCHITECTURES
from tests.arm.emulator import PROCESSORS, ROOT, Emulator, MissingError, prepare
from tests.arm.worker import TEXT, answers, live_rows
from xl_export.artefact.export import export

pytestmark = [pytest.mark.arm, pytest.mark.timeout(3600)]
QUANTISED_SIZES = {"d_model": 64, "heads": 2, "head_dim": 32, "d_ff": 96}
# Rows of unequal length: not where positions count from the segment's end, and not in these forms of memory.
NO_ROWS = [name for name, sizes in ARCHITECTURES.items() if sizes.get("from_segment_end")] + [
    "shift",
    "hidden",
]
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # a run's sizes, and the options of its export
    **{name: (sizes, {}) for name, sizes in ARCHITECTURES.items()},
    "zeros": ({"rule": ARCHITECTURES["adaptive-softmax-wide-first"]["rule"]}, {}),
    "shift": ({}, {"memory": "shift"}),
    "hidden": ({}, {"memory": "hidden"}),
    "fp16": ({}, {"precision": "fp16"}),
    "memory of halves": ({}, {"memory_precision": "fp16"}),
    "memory of bytes": ({}, {"memory_precision": "int8"}),
    "int8-stored": (QUANTISED_SIZES, {"precision": "int8-stored"}),
    "int8": (QUANTISED_SIZES, {"precision": "int8"}),
    "int4": (QUANTISED_SIZES, {"precision": "int4"}),
    "all-attention int8": (
        ARCHITECTURES["all-attention"] | QUANTISED_SIZES | {"d_ff": 0},
        {"precision": "int8"},
    ),
    "all-attention int4": (
        ARCHITECTURES["all-attention"] | QUANTISED_SIZES | {"d_ff": 0},
        {"precision": "int4"},
    ),
}
IN_BYTES = ("memory of bytes", "int8-stored", "int8", "int4")
FUSED = ("transformer-xl", "shaw", "fp16", "memory of halves", *IN_BYTES)  # at least
# The newer processors differ where there are other products for them, and an emulator is slow.
JOBS = dict(zip(PROCESSORS, (list(MODELS), FUSED, IN_BYTES), strict=True))
# Halves are rounded alike everywhere; activations of quantised products are rounded differently on ARM.
NATS = {
    "fp16": 2e-3,
    "memory of halves": 2e-3,
    "memory of bytes": 5e-3,
    "int8": 1e-2,
    "int4": 1e-2,
}


@pytest.fixture(scope="module")
def emulator() -> Emulator:
    try:
        return prepare(ROOT / "build" / "arm")
    except MissingError as error:
        pytest.fail(str(error), pytrace=False)


@pytest.fixture(scope="module")
def exported(
    make_run: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Path, Path]]:
    """The run and the artefact of every model."""
    folder = tmp_path_factory.mktemp("exported")
    both = {}
    for number, (name, (sizes, options)) in enumerate(MODELS.items()):
        run = make_run(**sizes)
        if (
            "d_model" in sizes
        ):  # as small as trained weights, or the sums of a wider model lose too many digits
            file = run / "model.safetensors"
            save_file({key: 0.4 * tensor for key, tensor in load_file(file).items()}, file)
        (run / "test.txt").write_text(3 * TEXT)
        both[name] = run, export(run, folder / str(number), **options)
    return both


@pytest.fixture(scope="module")
def told(
    emulator: Emulator, exported: dict[str, tuple[Path, Path]], tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, str, str], dict[str, Any]]:
    """What the emulated processors said, by processor, model and kernel."""
    folder, said = tmp_path_factory.mktemp("jobs"), {}
    for processor, names in JOBS.items():
        jobs = [{"name": n, "artefact": str(exported[n][1]), "live": n not in NO_ROWS} for n in names]
        (folder / "jobs.json").write_text(json.dumps(jobs))
        out, worker = folder / f"{processor}.jsonl", Path(__file__).with_name("worker.py")
        wrong = emulator.run(
            worker, folder / "jobs.json", processor=processor, cache=folder / "cache", out=out
        )
        assert not wrong, wrong
        for line in map(json.loads, out.read_text().splitlines()):
            said[processor, line["name"], line["kernel"]] = line
    return said


@pytest.mark.parametrize("processor", PROCESSORS)
def test_the_wheel_brings_the_fused_operator(
    processor: str, told: dict[tuple[str, str, str], dict[str, Any]]
) -> None:
    variants = {line["variant"] for (own, *_), line in told.items() if own == processor}
    assert variants == {PROCESSORS[processor].variant}
    served = {name for own, name, kernel in told if own == processor and kernel == "fused"}
    assert served >= set(FUSED) & set(JOBS[processor])


@pytest.mark.parametrize("name", MODELS)
def test_it_answers_as_the_host(
    name: str,
    told: dict[tuple[str, str, str], dict[str, Any]],
    exported: dict[str, tuple[Path, Path]],
    tmp_path: Path,
) -> None:
    artefact = exported[name][1]
    host = answers(artefact, tmp_path, live=name not in NO_ROWS)
    assert host["kernel"] == "standard"
    assert host["passed"]
    nats = NATS.get(name.split()[-1], NATS.get(name, 1e-4))
    lines = {key: line for key, line in told.items() if key[1] == name}
    expected = {(own, "standard") for own in PROCESSORS if name in JOBS[own]}
    assert expected <= {(own, kernel) for own, _, kernel in lines}
    for key, line in lines.items():
        assert "error" not in line, (key, line)
        assert line["passed"], (key, line["max_difference"], line["tolerance"])
        assert line["max_difference"] > 0, key
        if nats < 1e-2:  # where products are rounded differently, two tokens may be nearly as likely
            assert line["generated"] == host["generated"], key
        assert abs(line["bits"] - host["bits"]) < 2 * nats, key
        assert np.abs(np.subtract(line["scores"], host["scores"])).max() < 20 * nats, key
        if host["live"]:
            assert np.abs(np.subtract(line["live"], host["live"])).max() < nats, key


@pytest.mark.parametrize(
    "name", [name for name, (_, options) in MODELS.items() if not options and name not in NO_ROWS]
)
def test_live_rows_are_those_of_pytorch(
    name: str,
    told: dict[tuple[str, str, str], dict[str, Any]],
    exported: dict[str, tuple[Path, Path]],
) -> None:
    from runtimes import open_session

    expected = live_rows(open_session(exported[name][0]))
    for key, line in told.items():
        if key[1] == name:
            assert np.abs(np.subtract(line["live"], expected)).max() < 1e-4, key

"""`xl-export build`: engines of TensorRT-RTX, built here; what it refuses, in one sentence."""

from __future__ import annotations

import functools
import json
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from runtimes.contract.engine import PLAN, load_engine, side_files
from runtimes.contract.spec import BUILD, load_spec
from tests import fake_gpu
from tests.commands import json_of, refused, xl
from tests.nightly import every
from tests.runtimes.tasks.references import read_reference
from xl_export.artefact.export import export
from xl_export.tensorrt import build as building
from xl_export.tensorrt.options import BuildOptions
from xl_export.tensorrt.trtexec import LINE, full_position, trtexec_command

RTX = ("--flavour", "rtx", "--compute-capability", "8.6,12.0")


@pytest.fixture(scope="module")
def built(artefacts: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """An engine, and what the command that built it printed."""
    pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx is not installed (it is for Linux on x86-64)")
    out = tmp_path_factory.mktemp("built") / "engine"
    result = xl("build", artefacts["shift"], "--out", out, *RTX, "--batch", "1:2:4", "--token-batch", 2)
    assert result.exit_code == 0, result.output
    return out, result.stdout


def test_an_engine_folder_is_whole_and_says_what_it_is(
    built: tuple[Path, str], artefacts: dict[str, Path]
) -> None:
    folder, _ = built
    inputs = {
        f"{which}.{name}.bin" for which in ("segment", "token") for name in ("input_ids", "position_ids")
    }
    facts, spec = load_engine(folder)
    assert {path.name for path in folder.iterdir()} == {
        PLAN,
        BUILD,
        LINE,
        "sampling.json",
        *side_files(spec),
        *inputs,
    }
    assert spec == load_spec(artefacts["shift"])
    assert facts.artefact == spec.identity
    assert (facts.flavour, facts.attention, facts.plugin_layers, facts.gpu) == ("rtx", "native", 0, None)
    assert facts.compute_capabilities == ("8.6", "12.0")
    assert [(p.name, p.batch, p.tokens) for p in facts.profiles] == [
        ("segment", (1, 2, 4), (1, 8, 8)),
        ("token", (2, 2, 2), (1, 1, 1)),
    ]
    assert facts.layers["ATTENTION_INPUT"] == spec.model.layers
    assert facts.types["FLOAT"] > facts.layers["MATRIX_MULTIPLY"]
    assert facts.files[PLAN].num_bytes > 100_000


def test_build_prints_the_plan_and_trtexecs_command(
    built: tuple[Path, str], artefacts: dict[str, Path]
) -> None:
    folder, said = built
    first, second = said.splitlines()
    assert first.startswith(f"{folder} is ready: TensorRT-RTX ")
    assert second.startswith(str(folder / LINE))
    build_line, *timing = (folder / LINE).read_text().splitlines()
    words = shlex.split(build_line)
    assert words[:3] == [
        "tensorrt_rtx",
        f"--onnx={artefacts['shift'] / 'step.onnx'}",
        "--saveEngine=step.plan",
    ]
    assert words.count("--profile=0") == words.count("--profile=1") == 1
    most = [word for word in words if word.startswith("--maxShapes=input_ids:")]
    assert [word.split(",")[0] for word in most] == [
        "--maxShapes=input_ids:4x8",
        "--maxShapes=input_ids:2x2",
    ]  # see trtexec_command
    assert {"--noTF32", "--computeCapabilities=8.6,12.0"} <= set(words)
    for index, (line, sizes) in enumerate(zip(timing, ("2x8", "2x1"), strict=True)):
        words = shlex.split(line)
        assert words[:3] == ["tensorrt_rtx", "--loadEngine=step.plan", f"--useProfile={index}"]
        assert words[3].startswith(f"--shapes=input_ids:{sizes},")
        name = ("segment", "token")[index]
        assert words[4:] == [
            f"--loadInputs=input_ids:{name}.input_ids.bin,position_ids:{name}.position_ids.bin"
        ]
    tokens = np.fromfile(folder / "segment.input_ids.bin", np.int64)
    reference = read_reference(folder)["tokens"]
    assert np.array_equal(tokens.reshape(2, 8), reference[:, :8])
    positions = np.fromfile(folder / "token.position_ids.bin", np.int64)
    assert positions.tolist() == [load_spec(artefacts["shift"]).rule.slots] * 2  # the memory is full


def test_info_reads_an_engine(built: tuple[Path, str]) -> None:
    document = json_of(xl("info", built[0], "--json"))
    assert document["kind"] == "engine"
    assert document["engine"]["flavour"] == "rtx"
    assert "engine.gpu null\n" in xl("info", built[0], "--all").stdout


def test_running_an_engine_without_a_gpu_is_refused(
    built: tuple[Path, str], text: str, tmp_path: Path
) -> None:
    cuda = pytest.importorskip("cuda.bindings.runtime", reason="cuda-bindings is not installed")
    problem, count = cuda.cudaGetDeviceCount()
    if problem == cuda.cudaError_t.cudaSuccess and count:
        pytest.skip("there is a GPU here")
    (tmp_path / "some.txt").write_text(text[:100])
    for command in (("check",), ("eval", "--text", tmp_path / "some.txt"), ("generate", "--prompt", "The ")):
        refused(xl(command[0], built[0], *command[1:]), "no NVIDIA GPU can be used here")


@pytest.mark.parametrize(("flavour", "advice"), [("tensorrt", "tensorrt>="), ("rtx", "tensorrt-rtx>=")])
def test_a_missing_tensorrt_comes_with_its_installation(
    artefacts: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flavour: str, advice: str
) -> None:
    # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, {"tensorrt": "tensorrt", "rtx": "tensorrt_rtx"}[flavour], None)
    options = RTX if flavour == "rtx" else ()
    refused(
        xl("build", artefacts["shift"], "--out", tmp_path / "engine", *options), "is not installed", advice
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow  # a process of its own
def test_a_build_needs_neither_pytorch_nor_onnx_runtime(artefacts: dict[str, Path], tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx is not installed (it is for Linux on x86-64)")
    names = ("torch", "onnxruntime", "onnx_ir", "trainer.model", "trainer.run.checkpoint", "safetensors")
    block = f"import sys\nfor name in {names}: sys.modules[name] = None\n"
    command = [sys.executable, "-c", block + "from xl_export.cli.main import main; main()", "build"]
    arguments = [str(artefacts["shift"]), "--out", str(tmp_path / "engine"), *RTX]
    ended = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=280)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == ""


def test_weights_of_few_bits_are_refused(make_run: Callable[..., Path], tmp_path: Path) -> None:
    artefact = export(
        make_run(d_model=32, head_dim=16), tmp_path / "artefact", memory="shift", precision="int8"
    )
    result = xl("build", artefact, "--out", tmp_path / "engine", *RTX)
    assert result.exit_code == 2
    assert "has int8 weights, whose operators only ONNX Runtime has; export it with" in result.output


@pytest.mark.parametrize("moment", every(3, ["phase_start", "parse", "step_complete"]))
def test_an_interrupted_build_leaves_nothing(
    moment: str, artefacts: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx is not installed (it is for Linux on x86-64)")

    def interrupted(*arguments: object, work: Callable, **named: object) -> object:
        signal.raise_signal(signal.SIGINT)
        return work(*arguments, **named)

    def make(trt: object, held: object) -> object:
        monitor = make_monitor(trt, held)
        setattr(monitor, moment, functools.partial(interrupted, work=getattr(monitor, moment)))
        return monitor

    if moment == "parse":
        monkeypatch.setattr(building, "parse", functools.partial(interrupted, work=building.parse))
    else:
        make_monitor = building.make_monitor
        monkeypatch.setattr(building, "make_monitor", make)
    result = xl("build", artefacts["shift"], "--out", tmp_path / "engine", *RTX)
    assert result.exit_code == 130, result.output
    assert list(tmp_path.iterdir()) == []


def test_the_line_for_trtexec_has_every_option(artefacts: dict[str, Path], tmp_path: Path) -> None:
    spec = load_spec(artefacts["shift"])
    options = BuildOptions(
        hardware="ampere-plus",
        version_compatible=True,
        refit=True,
        workspace_mib=512,
        optimization_level=4,
        timing_cache=tmp_path / "cache",
    )
    words = shlex.split(trtexec_command(artefacts["shift"], spec, options, {}))
    assert words[0] == "trtexec"
    assert any(word.startswith("--maxShapes=input_ids:8x1,") for word in words)
    assert {
        "--stronglyTyped",
        "--refit",
        "--versionCompatible",
        "--hardwareCompatibilityLevel=ampere+",
        "--builderOptimizationLevel=4",
        "--memPoolSize=workspace:512M",
        f"--timingCacheFile={tmp_path / 'cache'}",
        "--noTF32",
    } <= set(words)


def test_steps_are_timed_where_no_ring_ends() -> None:
    """Adaptive spans have rings of many sizes, which end within nearly every segment."""
    assert full_position(600, ()) == 600
    assert full_position(600, {600}) == 600
    assert full_position(600, {600, 540}) == 5400
    assert full_position(2312, {512 + 45 * number + number**2 for number in range(1, 41)}) == 0


def test_the_suggested_build_command_works(
    artefacts: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx is not installed (it is for Linux on x86-64)")
    fake_gpu.install(monkeypatch, package="tensorrt_rtx")
    folder = fake_gpu.make_engine(
        artefacts["shift"],
        tmp_path / "engine",
        flavour="rtx",
        gpu=None,
        hardware="same-capability",
        version="1.0.0.1",
        compute_capabilities=("8.6",),
    )
    said = xl("check", folder)
    refused(said, "was built by TensorRT-RTX 1.0.0.1")
    monkeypatch.undo()
    command = said.stderr.partition("`")[2].partition("`")[0]
    words = shlex.split(command.replace("ARTEFACT", str(artefacts["shift"])))
    assert words[0] == "xl-export"
    assert xl(*words[1:]).exit_code == 0, command
    assert json.loads((folder / BUILD).read_text())["compute_capabilities"] == ["8.9"]  # that of the GPU here

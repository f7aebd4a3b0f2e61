"""Export: validated before it appears, whole or absent, and refused in one sentence where it cannot be."""

from __future__ import annotations

import json
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from runtimes import UserError, check, open_session
from runtimes.contract.reference import load_reference
from runtimes.contract.rule import MemoryRule
from runtimes.contract.spec import load_spec
from runtimes.sessions import fused_cpu
from tests import host_gpu
from tests.commands import refused, xl
from tests.nightly import every
from tests.sealing import identity
from xl_export.artefact.export import export
from xl_export.cli.main import main
from xl_export.graph import genai, step, visibility
from xl_export.graph.fused_cpu import FusedStepGraph


def test_check_replays_the_reference_past_three_rings_with_a_restart(artefacts: dict[str, Path]) -> None:
    for folder in artefacts.values():
        spec = load_spec(folder)
        reference = load_reference(folder, spec)
        assert reference.segments.sum() > 3 * spec.rule.slots
        assert {1, 7, spec.rule.segment} <= set(reference.segments.tolist())
        assert reference.restarts.sum() == 1
        report = check(folder)
        assert report.passed
        assert report.max_difference < 1e-5


def test_a_graph_that_computes_something_else_is_never_written(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = step.position_table
    monkeypatch.setattr(step, "position_table", lambda *which: np.roll(table(*which), 1, axis=2))
    with pytest.raises(UserError, match=r"^step.onnx differs from PyTorch by .* nats"):
        export(run, tmp_path / "artefact")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def operator(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The fused operator is built on this machine."""
    if shutil.which("g++") is None:
        pytest.skip("there is no g++ here to build the operator with")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    fused_cpu.build()


@pytest.mark.parametrize("precision", ["fp32", "int8"])
@pytest.mark.parametrize(
    ("file", "written_by", "attention"),
    [
        ("fused.onnx", "xl_export.graph.fused_cpu.FusedStepGraph", None),
        ("cuda.onnx", "xl_export.graph.cuda.CudaStepGraph", "plugin"),
    ],
)
def test_every_graph_that_runs_here_is_compared(
    file: str,
    written_by: str,
    attention: Any,
    precision: Any,
    make_run: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    operator: None,
) -> None:
    """The node for `cuda` computes on the CPU here, and no quantised weight hides what is wrong."""

    class ForgetsTheOldest(FusedStepGraph):
        def attributes(self, *group: Any, **columns: int) -> dict[str, int | float]:
            found = super().attributes(*group, **columns)
            return found | {"mem_len": found["mem_len"] - 1}

    run = make_run(head_dim=8)
    host_gpu.install(monkeypatch)
    monkeypatch.setattr("xl_export.graph.cuda.CudaStepGraph", FusedStepGraph)
    whole = export(run, tmp_path / "whole", attention=attention, precision=precision)
    assert file in load_spec(whole).files
    assert load_spec(whole).not_compared == ()
    monkeypatch.setattr(written_by, ForgetsTheOldest)
    with pytest.raises(UserError, match=f"^{file} differs from PyTorch by"):
        export(run, tmp_path / "wrong", attention=attention, precision=precision)
    assert list(tmp_path.iterdir()) == [whole]


def test_a_graph_that_cannot_run_here_is_named(make_run: Callable[..., Path], tmp_path: Path) -> None:
    run, artefact = make_run(head_dim=8), tmp_path / "artefact"
    result = xl("export", run, "--out", artefact, "--attention-as", "node")
    assert "fused.onnx, cuda.onnx: not compared with PyTorch" in result.stdout
    assert load_spec(artefact).not_compared == ("fused.onnx", "cuda.onnx")
    assert "unchecked   fused.onnx, cuda.onnx: " in xl("info", artefact).stdout
    for options in ({"memory": "shift"}, {"storage": "single-file"}):
        export(run, artefact, force=True, **options)
        assert "not_compared" not in json.loads((artefact / "spec.json").read_text())


def test_validation_sees_an_error_that_only_a_wrapped_ring_has(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the window, streams shorter than the memory are right: single segments cannot tell."""

    def all_that_came_before(op, rule, distance, position, offset):  # type: ignore[no-untyped-def]
        zero = op.constant(np.array(0))
        return op.And(op.GreaterOrEqual(distance, zero), op.LessOrEqual(distance, op.Max(position, zero)))

    monkeypatch.setattr(visibility, "visible", all_that_came_before)
    with pytest.raises(UserError, match="over 2 streams"):
        export(run, tmp_path / "artefact")


def test_an_existing_folder_is_kept_unless_forced(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "artefact"
    out.mkdir()
    (out / "mine.txt").write_text("mine")
    for folder in (out, run):
        with pytest.raises(UserError, match="holds other things"):
            export(run, folder, force=True)
    assert [file.name for file in out.iterdir()] == ["mine.txt"]
    (out / "mine.txt").unlink()
    export(run, out, force=True)
    with pytest.raises(UserError, match="exists already"):
        export(run, out)
    export(run, out, force=True)
    assert check(out).passed
    assert [file.name for file in tmp_path.iterdir()] == ["artefact"]


def test_rule_options_reach_the_artefact(run: Path, tmp_path: Path) -> None:
    options = "--mem-len 11 --segment 5 --mask full --clamp-len 6 --initial-memory zeros --memory shift"
    result = xl("export", run, "--out", tmp_path / "a", *options.split())
    spec = load_spec(tmp_path / "a")
    assert spec.rule == MemoryRule(mem_len=11, segment=5, mask="full", clamp_len=6, initial_memory="zeros")
    assert spec.form == "shift"
    assert "11, segment 5, full mask, clamp 6" in result.output


def test_a_clamp_of_zero_is_none(make_run: Callable[..., Path], tmp_path: Path) -> None:
    run = make_run(layers=1, rule=MemoryRule(mem_len=8, segment=4, clamp_len=5))
    assert xl("export", run, "--out", tmp_path / "a", "--clamp-len", "0").exit_code == 0
    assert load_spec(tmp_path / "a").rule.clamp_len is None


def test_a_full_disk_leaves_nothing(run: Path, tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (9000, limits[1]))
    try:
        result = xl("export", run, "--out", tmp_path / "artefact")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    refused(result, f"{tmp_path / 'artefact'} could not be written: File too large")
    assert list(tmp_path.iterdir()) == []


# One by default; each needs a process that imports PyTorch.
SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGKILL)
KILLS = every(9, [(nth, how) for nth in (2, 1, 3) for how in SIGNALS])


@pytest.mark.parametrize(("nth", "how"), KILLS)
def test_a_kill_while_writing_leaves_no_artefact(
    nth: int, how: signal.Signals, run: Path, tmp_path: Path
) -> None:
    arguments = [
        sys.executable,
        "-c",
        EXPORT_IN_STEPS,
        "export",
        str(run),
        "--out",
        str(tmp_path / "artefact"),
    ]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(arguments, text=True, **pipes) as process:  # type: ignore[call-overload]
        for step in range(1, nth + 1):  # the graph, the reference, the spec
            assert process.stdout.readline() == "writing\n"
            if step < nth:
                print("go on", file=process.stdin, flush=True)
        assert [path.name for path in tmp_path.iterdir()] != [], "a hidden folder is being filled"
        process.send_signal(how)
    assert not (tmp_path / "artefact").exists()
    if how != signal.SIGKILL:  # what can be cleaned up is
        assert process.returncode == 128 + how
        assert list(tmp_path.iterdir()) == []


# It waits before each file for a line, so that a slow machine cannot finish before the signal comes.
EXPORT_IN_STEPS = """
import sys
from xl_export.artefact import export, write
from xl_export.cli.main import main
def waiting(module, name):
    step = getattr(module, name)
    def wrapped(*a, **k):
        print("writing", flush=True)
        sys.stdin.readline()
        return step(*a, **k)
    setattr(module, name, wrapped)
waiting(export, "save_model")
waiting(write, "save_reference")
waiting(write, "save_spec")
main()
"""


def test_finite_weights_whose_answers_are_not_are_refused(
    make_run: Callable[..., Path], tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    run = make_run()
    state = load_file(run / "model.safetensors")
    state["blocks.1.out.weight"][:] = 3e38
    save_file(state, run / "model.safetensors")
    with pytest.raises(
        UserError, match="PyTorch itself gives log-probabilities that are not numbers over 1 rows of 1 tokens"
    ):
        export(run, tmp_path / "artefact")
    assert list(tmp_path.iterdir()) == []


def test_weights_that_are_not_finite_are_refused(make_run: Callable[..., Path], tmp_path: Path) -> None:
    import torch

    from trainer.run.checkpoint import load_run, save_tensors

    run = make_run()
    state = load_run(run).model.state_dict()
    state["blocks.1.out.weight"][0, 0] = torch.nan
    save_tensors(run / "model.safetensors", state)
    with pytest.raises(UserError, match=r"blocks\.1\.out\.weight holds values that are not finite"):
        export(run, tmp_path / "artefact")


def test_the_artefact_opens_without_pytorch(artefacts: dict[str, Path]) -> None:
    code = (
        "import sys; sys.modules['torch'] = None; import runtimes; print(runtimes.check(sys.argv[1]).passed)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, str(artefacts["ring"])], capture_output=True, text=True
    )
    assert result.stdout == "True\n", result.stderr


def test_the_files_of_an_artefact_are_those_of_its_spec(artefacts: dict[str, Path]) -> None:
    for folder in artefacts.values():
        spec = load_spec(folder)
        unsealed = {"sampling.json", *["genai_config.json"] * genai.takes(spec)}
        assert {file.name for file in folder.iterdir()} == unsealed | {*spec.files, "spec.json"}
        assert identity(folder / "spec.json") == spec.identity == open_session(folder).identity


@pytest.mark.parametrize("option", ["--mem-len", "--segment"])
def test_lengths_beyond_the_machine_are_refused(option: str, run: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["export", str(run), "--out", str(tmp_path / "a"), option, "16000000"])
    assert result.exit_code == 2
    assert "GiB and this machine has" in result.stderr
    assert list(tmp_path.iterdir()) == []

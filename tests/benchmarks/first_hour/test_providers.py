"""The steps for ONNX Runtime's providers and for the commands, with the CPU in place of a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.first_hour.catalogue import STEPS
from benchmarks.first_hour.record import Record
from benchmarks.first_hour.results import StepResult
from benchmarks.first_hour.steps import commands, providers
from runtimes.base.errors import MissingPackageError
from runtimes.cli import eval as evaluate_command


def test_the_cuda_provider_is_given_no_graph_that_it_refuses() -> None:
    tried = set()
    for step in STEPS:
        if step.target.endswith("providers:run"):
            device, precision, memory = (step.options[name] for name in ("device", "precision", "memory"))
            kinds = providers.kinds_of(device, precision, memory)  # type: ignore[arg-type]
            if device == "cuda":
                assert {kind.target for kind in kinds} == {"onnxruntime"}
                tried |= {(kind.form, kind.precision, kind.memory) for kind in kinds}
            else:
                assert [(kind.form, kind.memory) for kind in kinds] == [("shift", "fp32")]
    assert tried == {
        *((form, "fp32", "fp32") for form in ("ring", "shift", "hidden")),
        *((form, "fp16", "fp32") for form in ("ring", "shift")),
        *(("ring", precision, "fp32") for precision in ("int8", "int4")),
        *(("ring", "fp32", memory) for memory in ("fp16", "int8")),
    }


@pytest.mark.parametrize("memory", ["fp32", "int8"])
def test_a_provider_is_checked_and_timed(
    memory: Any, record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CPU in place of CUDA."""
    kinds = providers.kinds_of("cuda", "fp32", memory)
    monkeypatch.setattr(providers, "kinds_of", lambda *given: kinds[:1])
    providers.run(record, size="small", device="cpu", precision="fp32", memory=memory)
    record.finish()
    assert record.result.status in ("passed", "slower"), record.result  # times say nothing about a busy CPU
    assert [check.passed for check in record.result.checks] == [True] * 3
    assert [(row.batch, row.tokens) for row in record.result.rows] == [(1, 1), (1, 8), (8, 1), (8, 8)]


def test_the_commands_are_compared_with_those_on_the_cpu(
    record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands.run(record, size="small", devices="cpu")
    names = ["run on cpu: eval", "run on cpu: generate", "artefact on cpu: eval", "artefact on cpu: generate"]
    assert [(check.name, check.passed) for check in record.result.checks] == [(name, True) for name in names]
    assert record.result.facts["run on cpu: computed by"].startswith("PyTorch")
    assert record.result.facts["artefact on cpu: computed by"].startswith("ONNX Runtime")
    said = commands._said

    def other(folder: Path, text: Path, device: str) -> dict[str, Any]:
        answer = said(folder, text, "cpu")
        return answer if device == "cpu" else {**answer, "bits": answer["bits"] + 0.01, "ids": [1]}

    monkeypatch.setattr(commands, "_said", other)
    record.result = StepResult(name="wrong")
    commands.run(record, size="small", devices="cuda")
    assert [check.passed for check in record.result.checks] == [False] * 4


def test_a_package_that_a_command_lacks_ends_the_step(
    record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = commands._said

    def lacking(path: Path, **options: Any) -> Any:
        raise MissingPackageError("onnxruntime-gpu is not installed.")

    def on_device(folder: Path, text: Path, device: str) -> dict[str, Any]:
        if device != "cpu":
            monkeypatch.setattr(evaluate_command, "open_session", lacking)
        return said(folder, text, device)

    monkeypatch.setattr(commands, "_said", on_device)
    with pytest.raises(MissingPackageError, match=r"^onnxruntime-gpu is not installed\.$"):
        commands.run(record, size="small", devices="cuda")

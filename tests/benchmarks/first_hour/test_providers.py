"""The steps for ONNX Runtime's providers and for the commands, with the CPU in place of a GPU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.first_hour.catalogue import STEPS
from benchmarks.first_hour.record import Record
from benchmarks.first_hour.results import StepResult
from benchmarks.first_hour.steps import commands, models, providers
from runtimes.base.errors import MissingPackageError
from runtimes.cli import eval as evaluate_command
from runtimes.contract.spec import load_spec


def test_the_cuda_provider_is_given_no_graph_that_it_refuses() -> None:
    tried, full = set(), set()
    for step in STEPS:
        if step.target.endswith("providers:run"):
            names = ("device", "precision", "memory", "mask")
            kinds = providers.kinds_of(*(step.options[name] for name in names))  # type: ignore[arg-type]
            device = step.options["device"]
            if device == "cuda":
                assert {kind.target for kind in kinds} == {"onnxruntime"}
                full |= {kind for kind in kinds if kind.mask == "full"}
                tried |= {(kind.form, kind.precision, kind.memory) for kind in kinds if kind not in full}
            else:
                assert [(kind.form, kind.memory) for kind in kinds] == [("shift", "fp32")]
    assert tried == {
        *((form, "fp32", "fp32") for form in ("ring", "shift", "hidden")),
        *((form, "fp16", "fp32") for form in ("ring", "shift")),
        *(("ring", precision, "fp32") for precision in ("int8", "int8-stored", "int4")),
        *(("ring", "fp32", memory) for memory in ("fp16", "int8")),
    }
    assert [(kind.form, kind.precision, kind.memory) for kind in full] == [("shift", "fp32", "fp32")]


@pytest.mark.parametrize(
    ("precision", "memory", "mask"),
    [
        ("fp32", "fp32", "same-length"),
        ("fp32", "int8", "same-length"),
        ("int8-stored", "fp32", "same-length"),
        ("fp32", "fp32", "full"),
    ],
)
def test_a_provider_is_checked_and_timed(
    precision: Any, memory: Any, mask: Any, record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CPU in place of CUDA."""
    kinds = providers.kinds_of("cuda", precision, memory, mask)
    monkeypatch.setattr(providers, "kinds_of", lambda *given: kinds[:1])
    providers.run(record, size="small", device="cpu", precision=precision, memory=memory, mask=mask)
    record.finish()
    assert record.result.status in ("passed", "slower"), record.result  # times say nothing about a busy CPU
    assert [check.passed for check in record.result.checks] == [True] * 3
    assert [(row.batch, row.tokens) for row in record.result.rows] == [(1, 1), (1, 8), (8, 1), (8, 8)]
    artefact = models.artefact_of(record, models.config_of("small", quick=True), kinds[0])
    assert load_spec(artefact).rule.mask == mask


def test_the_commands_are_compared_with_those_on_the_cpu(
    record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands.run(record, size="small", devices="cpu")
    said_by = ("eval", "score", "generate")
    names = [f"{kind} on cpu: {command}" for kind in ("run", "artefact") for command in said_by]
    assert [(check.name, check.passed) for check in record.result.checks] == [(name, True) for name in names]
    assert record.result.facts["run on cpu: computed by"].startswith("PyTorch")
    assert record.result.facts["artefact on cpu: computed by"].startswith("ONNX Runtime")
    said = commands._said

    def other(texts: Callable[..., Any], folder: Path, text: Path, device: str) -> dict[str, Any]:
        answer = said(folder, text, "cpu")
        if device == "cpu":
            return answer
        return {**answer, "bits": answer["bits"] + 0.01, "ids": [1], "texts": texts(answer["texts"])}

    def other_scores(found: list[tuple[int, float]]) -> list[tuple[int, float]]:
        return [*found[:-1], (found[-1][0], found[-1][1] - 1)]

    def not_a_number(found: list[tuple[int, float]]) -> list[tuple[int, float]]:
        return [*found[:-1], (found[-1][0], float("nan"))]

    def other_tokens(found: list[tuple[int, float]]) -> list[tuple[int, float]]:
        return [(tokens + 1, log_prob) for tokens, log_prob in found]

    for texts in (other_scores, not_a_number, other_tokens):
        monkeypatch.setattr(commands, "_said", functools.partial(other, texts))
        record.result = StepResult(name="wrong")
        commands.run(record, size="small", devices="cuda")
        assert [check.passed for check in record.result.checks] == [False] * 6


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

"""ONNX Runtime's providers for NVIDIA GPUs: opened, checked, compared with the CPU, and timed."""

from __future__ import annotations

from benchmarks.first_hour.record import Record
from benchmarks.first_hour.steps import timed
from benchmarks.first_hour.steps.models import Kind, Target, artefact_of, config_of
from runtimes import open_session
from runtimes.contract.precision import MemoryPrecision, Precision, named
from runtimes.contract.tensors import Form

FORMS: dict[Precision, tuple[Form, ...]] = {"fp32": ("ring", "shift", "hidden"), "fp16": ("ring", "shift")}


def kinds_of(device: str, precision: Precision, memory: MemoryPrecision = "fp32") -> tuple[Kind, ...]:
    """The graphs that are tried for a precision on a device.

    TensorRT has no circular ring, so its providers take `shift`. A graph of the target `tensorrt` computes in
    float16 throughout; the CUDA provider refuses it, and takes one that only stores its weights so.
    """
    if device == "cuda":
        forms = FORMS.get(precision, ("ring",)) if memory == "fp32" else ("ring",)
        return tuple(
            Kind(target="onnxruntime", form=form, precision=precision, memory=memory) for form in forms
        )
    target: Target = "tensorrt" if precision == "fp16" else "onnxruntime"
    return (Kind(target=target, form="shift", precision=precision),)


def run(
    record: Record, *, size: str, device: str, precision: Precision, memory: MemoryPrecision = "fp32"
) -> None:
    """Opens the artefacts of a precision on a device, and keeps what they do there."""
    config = config_of(size, quick=record.quick)
    for kind in kinds_of(device, precision, memory):
        side = f"ONNX Runtime, {device}, {kind.form}, {named(precision, memory)}"
        with record.attempt(side):
            artefact = artefact_of(record, config, kind)
            session = open_session(artefact, device=device)
            timed.tried(
                record,
                artefact,
                session,
                config,
                side=side,
                form=kind.form,
                precision=precision,
                memory=memory,
                device=device,
            )

"""ONNX Runtime's providers for NVIDIA GPUs: opened, checked, compared with the CPU, and timed."""

from __future__ import annotations

from benchmarks.first_hour.record import Record
from benchmarks.first_hour.steps import timed
from benchmarks.first_hour.steps.models import Kind, Target, artefact_of, config_of
from runtimes import open_session
from runtimes.contract.precision import MemoryPrecision, Precision, named
from runtimes.contract.rule import Mask
from runtimes.contract.tensors import Form

FORMS: dict[Precision, tuple[Form, ...]] = {"fp32": ("ring", "shift", "hidden"), "fp16": ("ring", "shift")}


def kinds_of(
    device: str, precision: Precision, memory: MemoryPrecision = "fp32", mask: Mask = "same-length"
) -> tuple[Kind, ...]:
    """The graphs that are tried for a precision on a device.

    TensorRT has no circular ring, so its providers take `shift`. A graph of the target `tensorrt` computes in
    float16 throughout; the CUDA provider refuses it, and takes one that only stores its weights so. Under the
    mask `full` the form `shift` stands for the others: the mask is computed in the same way in all of them.
    """
    if mask == "full":
        return (Kind(target="onnxruntime", form="shift", precision=precision, memory=memory, mask=mask),)
    if device == "cuda":
        forms = FORMS.get(precision, ("ring",)) if memory == "fp32" else ("ring",)
        return tuple(
            Kind(target="onnxruntime", form=form, precision=precision, memory=memory) for form in forms
        )
    target: Target = "tensorrt" if precision == "fp16" else "onnxruntime"
    return (Kind(target=target, form="shift", precision=precision),)


def run(
    record: Record,
    *,
    size: str,
    device: str,
    precision: Precision,
    memory: MemoryPrecision = "fp32",
    mask: Mask = "same-length",
) -> None:
    """Opens the artefacts of a precision on a device, and keeps what they do there."""
    config = config_of(size, quick=record.quick)
    for kind in kinds_of(device, precision, memory, mask):
        side = f"ONNX Runtime, {device}, {kind.form}, {named(precision, memory)}" + ", mask full" * (
            mask == "full"
        )
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
                mask=mask,
                device=device,
            )

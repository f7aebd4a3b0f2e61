"""ONNX Runtime's providers for NVIDIA GPUs: opened, checked, compared with the CPU, and timed."""

from __future__ import annotations

from benchmarks.first_hour.record import Record
from benchmarks.first_hour.steps import timed
from benchmarks.first_hour.steps.models import Kind, Target, artefact_of, config_of
from runtimes import open_session
from runtimes.contract.precision import Precision


def kinds_of(device: str, precision: Precision) -> tuple[Kind, ...]:
    """The graphs that are tried for a precision on a device.

    TensorRT has no circular ring, so its providers take `shift`. A graph of the target `tensorrt` computes in
    float16 throughout; the CUDA provider refuses it, and takes one that only stores its weights so.
    """
    if device == "cuda":
        return tuple(Kind(target="onnxruntime", form=form, precision=precision) for form in ("ring", "shift"))
    target: Target = "tensorrt" if precision == "fp16" else "onnxruntime"
    return (Kind(target=target, form="shift", precision=precision),)


def run(record: Record, *, size: str, device: str, precision: Precision) -> None:
    """Opens the artefacts of a precision on a device, and keeps what they do there."""
    config = config_of(size, quick=record.quick)
    for kind in kinds_of(device, precision):
        side = f"ONNX Runtime, {device}, {kind.form}, {precision}"
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
                device=device,
            )

"""ONNX Runtime's providers for NVIDIA GPUs: opened, checked, compared with the CPU, and timed."""

from __future__ import annotations

from benchmarks.first_hour.record import Record
from benchmarks.first_hour.steps import timed
from benchmarks.first_hour.steps.models import Kind, artefact_of, config_of
from runtimes import open_session
from runtimes.contract.precision import Precision

# The graphs that are tried for a precision. TensorRT has no circular ring, so its providers take `shift`.
# A graph of the target `tensorrt` computes in float16 throughout; the other one stores its weights so.
RING: dict[Precision, Kind] = {
    "fp32": Kind(target="onnxruntime", form="ring", precision="fp32"),
    "fp16": Kind(target="onnxruntime", form="ring", precision="fp16"),
}
SHIFT: dict[Precision, Kind] = {
    "fp32": Kind(target="onnxruntime", form="shift", precision="fp32"),
    "fp16": Kind(target="tensorrt", form="shift", precision="fp16"),
}


def run(record: Record, *, size: str, device: str, precision: Precision) -> None:
    """Opens the artefacts of a precision on a device, and keeps what they do there."""
    config = config_of(size, quick=record.quick)
    for kind in [RING[precision]] * (device == "cuda") + [SHIFT[precision]]:
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

"""Puts the weights of a written artefact into its graph: one ONNX file, or one file of ONNX Runtime's format.

The graph is written and compared with PyTorch as always, in `step.onnx` and `weights.bin`. Then it is packed,
and the packed file is compared with what was packed, over the same reference, before the folder appears.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import tempfile
from pathlib import Path

import onnx_ir as ir

from runtimes.base.errors import ArtefactError, ConfigError, first_line
from runtimes.base.files import atomic_file
from runtimes.contract.precision import PRESETS, Precision
from runtimes.contract.reference import Reference
from runtimes.contract.spec import FUSED, GRAPH, OPERATORS, WEIGHTS, Spec, Storage
from runtimes.contract.vocabulary import Vocab
from runtimes.sessions import fused_cpu
from runtimes.sessions.onnx_runtime import OrtSession
from xl_export.artefact.validate import refuse_other_answers
from xl_export.graph.ops import quiet

LEVEL = "ORT_CONVERT_ONNX_MODELS_TO_ORT_OPTIMIZATION_LEVEL"  # the converter's option, a variable

# Protobuf and flatbuffers count bytes with 31 bits; the rest is for what the weights are wrapped in.
MAX_FILE_BYTES = (1 << 31) - (1 << 24)


def refuse_too_many(parameters: int, storage: Storage, precision: Precision) -> None:
    """Raises ConfigError for a storage that is too small for this number of parameters."""
    if storage != "external":
        _refuse_size(PRESETS[precision].bits * parameters // 8, storage)


def _refuse_size(num_bytes: int, storage: Storage) -> None:
    if num_bytes > MAX_FILE_BYTES:
        raise ConfigError(
            f"graph and weights have {num_bytes:,} bytes, and one file with both has at most "
            f"{MAX_FILE_BYTES:,}; leave out --{storage}, or give a --precision with fewer bits."
        )


def pack(spec: Spec, vocab: Vocab, folder: Path, reference: Reference) -> Spec:
    """Replaces the graphs and `weights.bin` in a folder by the file of the spec's storage.

    Returns the spec with the bytes of the new file in its measurements. Raises ConfigError if the weights are
    too large for it, and ArtefactError if its answers differ from what was packed.
    """
    _refuse_size(sum((folder / name).stat().st_size for name in (GRAPH, WEIGHTS)), spec.storage)
    library = fused_cpu.built() if spec.only_fused else None
    graph = folder / (FUSED if spec.only_fused else GRAPH)
    whole = OrtSession(dataclasses.replace(spec, storage="external"), vocab, graph, library=library)
    if spec.in_ort_format:
        level = "basic" if spec.exporter == "graph" else "all"  # as in `OrtSession`
        _as_ort(graph, folder / spec.graph_file, library, level=level)
    else:
        model = ir.external_data.load_to_model(ir.load(folder / GRAPH))
        with atomic_file(folder / GRAPH) as temporary:
            ir.save(model, temporary, format="protobuf")
    for name in {GRAPH, FUSED, WEIGHTS} - {spec.graph_file}:
        (folder / name).unlink(missing_ok=True)
    packed = OrtSession(spec, vocab, folder / spec.graph_file, library=library)
    refuse_other_answers(packed, whole, reference, option=f"--{spec.storage}")
    if spec.measured is None:
        return spec
    num_bytes = (folder / spec.graph_file).stat().st_size
    return dataclasses.replace(spec, measured=dataclasses.replace(spec.measured, num_bytes=num_bytes))


def _as_ort(graph: Path, out: Path, library: Path | None, *, level: str) -> None:
    """Writes a graph and the list of its operators in the format of ONNX Runtime, with its converter.

    library: of the fused operator, if the graph uses it. level: of the optimisation, `basic` or `all`. The
    converter optimises the graph for any processor, so it leaves out what only this one could compute.
    """
    from onnxruntime.tools.convert_onnx_models_to_ort import (
        OptimizationStyle,
        convert_onnx_models_to_ort,
    )

    with tempfile.TemporaryDirectory(dir=out.parent) as name:
        made = Path(name)
        os.environ[LEVEL] = level
        try:
            with quiet():  # the converter prints, and warns of a file that it leaves open
                convert_onnx_models_to_ort(
                    graph,
                    output_dir=made,
                    optimization_styles=[OptimizationStyle.Fixed],
                    custom_op_library_path=library,
                )
        except Exception as error:  # ONNX Runtime's errors have no common base class
            raise ArtefactError(
                f"ONNX Runtime could not write the graph in its own format ({first_line(error)}); export "
                "in another storage, or with another onnxruntime."
            ) from error
        finally:
            del os.environ[LEVEL]
        (operators,) = made.glob("*.config")  # the names of both files tell the level
        (written,) = made.glob("*.ort")
        lines = [line for line in operators.read_text().splitlines() if not line.startswith("#")]
        out.with_name(OPERATORS).write_text("\n".join(line for line in lines if line) + "\n")
        shutil.move(written, out)

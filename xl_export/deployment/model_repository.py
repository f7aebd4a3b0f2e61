"""ARTEFACT → MODEL REPOSITORY: a folder from which Triton Inference Server serves a model with its memory.

    REPOSITORY/NAME/config.pbtxt     what the server must know
    REPOSITORY/NAME/1/model.onnx     the step graph with `server_graph`'s changes, and its weights
    REPOSITORY/NAME/spec.json        the artefact's contract and vocabulary, for clients

For an engine, `1/model.plan` is built from the same graph. For the server's Python backend there are
`1/model.py`, which is `server_model`, and the whole artefact in `NAME/artefact`.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from pathlib import Path

import onnx_ir as ir

from runtimes.base.errors import ConfigError
from runtimes.base.folders import atomic_folder, refuse_existing
from runtimes.base.kinds import SERVER_MODEL
from runtimes.contract.engine import NAMES
from runtimes.contract.reference import load_reference, load_step_reference
from runtimes.contract.sampling import read_sampling, write_sampling
from runtimes.contract.spec import GRAPH, SPEC, Spec, load_language_model, load_spec, refuse_unless_one_onnx
from runtimes.contract.vocabulary import VOCAB_FILES
from runtimes.sessions.onnx_runtime import OrtSession
from xl_export.artefact.validate import refuse_other_answers
from xl_export.deployment import server_model
from xl_export.deployment.server_config import CONFIG, MAX_SEQUENCES, server_config, session_config
from xl_export.deployment.server_graph import SequenceGraph, sequence_graph
from xl_export.deployment.server_session import SequenceSession
from xl_export.graph.ops import save_model
from xl_export.tensorrt.options import BuildOptions

# Where the server looks for the first version of a model.
MODEL = "1/model.onnx"
ENGINE = "1/model.plan"
SESSION = "1/model.py"
NAME = re.compile(r"[\w-][\w.-]{0,99}", re.ASCII)
MAX_BATCH_STREAMS = 8  # the most streams in one batch on ONNX Runtime
MAX_SESSION_STREAMS = 32  # the same for a session
MEMORY_BYTES = 1 << 30  # of all streams that a session keeps, if that many fit


def model_folder(artefact: Path, repository: Path, *, force: bool = False) -> Path:
    """The folder of a repository for an artefact or engine of this name.

    Raises UserError if it exists, unless `force` is set, and for a name that the server does not accept.
    """
    name = artefact.resolve().name
    if not NAME.fullmatch(name):
        raise ConfigError(
            f"--triton calls the model {name!r:.60}, after its folder; give the folder a name of letters, "
            "digits, hyphens and dots."
        )
    folder = repository / name
    refuse_existing(folder, SERVER_MODEL, force=force, sources=[artefact])
    return folder


def write_model(artefact: Path, repository: Path, *, force: bool = False) -> Path:
    """Writes the model of an artefact for the server's ONNX Runtime backend; returns the model's folder.

    Raises UserError if the folder exists, unless `force` is set, and for an artefact that is damaged or
    that the server cannot run. Nothing is written then.
    """
    out = model_folder(artefact, repository, force=force)
    spec = load_spec(artefact)
    most = 1 if "rows" in spec.without else MAX_BATCH_STREAMS
    with atomic_folder(out, SERVER_MODEL, force=force, sources=[artefact]) as folder:
        (folder / MODEL).parent.mkdir()
        graph = write_sequence_graph(artefact, spec, folder / MODEL)
        config = server_config(graph, name=out.name, backend="onnxruntime", most_rows=most)
        _finish(folder, artefact, spec, config)
    return out


def write_session(artefact: Path, repository: Path, *, force: bool = False) -> Path:
    """Writes the model of an artefact for the server's Python backend, which runs a session of this project.

    Returns the model's folder. The memory of each stream stays where it is between requests, so the artefact
    must have a ring. Raises UserError like `write_model`, and for memory of another form.
    """
    out = model_folder(artefact, repository, force=force)
    spec = load_language_model(artefact)
    if not spec.in_place:
        raise ConfigError(
            f"the artefact has {spec.form} memory for {spec.target}, and the server's Python backend needs "
            "memory that is written in place; export it with --memory ring, for onnxruntime or tensorrt."
        )
    sequences = max(1, min(MAX_SEQUENCES, MEMORY_BYTES // spec.bytes_per_stream))
    with atomic_folder(out, SERVER_MODEL, force=force, sources=[artefact]) as folder:
        contents = folder / server_model.ARTEFACT
        contents.mkdir()
        for name in (SPEC, *spec.files):
            shutil.copyfile(artefact / name, contents / name)
        write_sampling(contents, read_sampling(artefact))
        (folder / SESSION).parent.mkdir()
        shutil.copyfile(Path(server_model.__file__), folder / SESSION)
        config = session_config(spec, name=out.name, sequences=sequences, most_rows=MAX_SESSION_STREAMS)
        (folder / CONFIG).write_text(config, encoding="utf-8")
    return out


def write_engine(artefact: Path, repository: Path, options: BuildOptions, *, name: Path, force: bool) -> Path:
    """Builds an artefact for the server's TensorRT backend; returns the model's folder.

    options: of a build for TensorRT; the server runs no engines of TensorRT-RTX. name: the engine's folder,
    after which the model is named. Raises UserError like `write_model`, and if TensorRT refuses the graph.
    """
    from xl_export.tensorrt.build import refuse_artefact, serialize, start_tensorrt
    from xl_export.tensorrt.network import parse

    out = model_folder(name, repository, force=force)
    spec = load_language_model(artefact)
    refuse_artefact(spec, artefact)
    profiles = options.profiles(spec.rule)
    trt, log, _ = start_tensorrt(spec, options)
    with atomic_folder(out, SERVER_MODEL, force=force, sources=[artefact]) as folder:
        (folder / ENGINE).parent.mkdir()
        with tempfile.TemporaryDirectory() as written:
            graph = write_sequence_graph(artefact, spec, Path(written) / GRAPH)
            parsed = parse(trt, log, Path(written), attention=options.attention, name=NAMES[options.flavour])
            plan = serialize(trt, log, parsed, spec, profiles, options, inputs=graph.all_inputs)
        (folder / ENGINE).write_bytes(plan)
        most = max(profile.batch[2] for profile in profiles)
        config = server_config(
            graph, name=out.name, backend="tensorrt", most_rows=most, profiles=len(profiles)
        )
        _finish(folder, artefact, spec, config)
    return out


def write_sequence_graph(artefact: Path, spec: Spec, file: Path) -> SequenceGraph:
    """Writes the step graph of an artefact as a graph for the server.

    It is fed as the server feeds it; raises ArtefactError unless its answers equal the artefact's.
    """
    graph = read_sequence_graph(artefact, spec)
    save_model(graph.model, file.parent, name=file.name)
    session = OrtSession.open(artefact, kernel="standard")
    written = SequenceSession(spec, session.vocab if spec.language_model else None, graph, file)
    load = load_reference if spec.language_model else load_step_reference
    refuse_other_answers(written, session, load(artefact, spec), option="--triton")
    return graph


def read_sequence_graph(artefact: Path, spec: Spec) -> SequenceGraph:
    """The step graph of an artefact as a graph for the server; its weights are read when it is saved."""
    refuse_unless_one_onnx(spec, artefact, what="Triton Inference Server")
    return sequence_graph(ir.load(artefact / GRAPH), spec)


def _finish(folder: Path, artefact: Path, spec: Spec, config: str) -> None:
    for file in (SPEC, *(name for name in VOCAB_FILES if name in spec.files)):
        shutil.copyfile(artefact / file, folder / file)
    (folder / CONFIG).write_text(config, encoding="utf-8")

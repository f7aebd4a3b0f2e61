"""`/v2`: the Open Inference Protocol. A sequence is a stream.

Arrays are in JSON, or in the binary form of the clients of Triton Inference Server: first the JSON, whose
length is in the header `Inference-Header-Content-Length`, and then the bytes of each array.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from importlib.metadata import version
from typing import Annotated, Any

import msgspec
import numpy as np
from starlette.responses import Response

from runtimes.base.element_types import ELEMENT_TYPES
from runtimes.contract.session import Session, is_language_model
from runtimes.contract.tensors import MAX_AXES, TensorSpec
from xl_export.serve.core.settings import Limits
from xl_export.serve.http.base.context import RequestContext, json, of_json
from xl_export.serve.http.base.encoding import to_json
from xl_export.serve.http.base.endpoint import BINARY, Endpoints
from xl_export.serve.http.base.errors import RefusedError, doc
from xl_export.serve.http.base.limits import decoded
from xl_export.serve.http.base.server import Model
from xl_export.serve.http.base.steps import as_numbers, step_signature
from xl_export.serve.http.base.workers import off_loop
from xl_export.serve.http.streams.documents import LONGEST_NUMBER
from xl_export.serve.http.streams.work import StreamWork

KINDS = ELEMENT_TYPES["float32"], ELEMENT_TYPES["int64"]  # of the inputs and outputs of steps
TYPES = {kind.inference: np.dtype(kind.stored) for kind in KINDS}
NAMES = {dtype: name for name, dtype in TYPES.items()}
HEADER = "inference-header-content-length"
LONGEST_ID = 128  # characters of the name of a sequence
MODEL = "/v2/models/{name}"
VERSION = f"{MODEL}/versions/1"  # of each model the only one
ENDPOINTS = Endpoints()


class InputParameters(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """How an input is sent."""

    binary_data_size: Annotated[
        Annotated[int, msgspec.Meta(ge=0)] | None,
        doc("How many bytes of it follow the JSON; null for `data`."),
    ] = None


class InputArray(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """An input of a step."""

    name: Annotated[str, doc("Its name.")]
    datatype: Annotated[str, doc("FP32, or INT64 for ids.")]
    shape: Annotated[list[int], doc("Its sizes; the first is the batch, 1.")]
    data: Annotated[list[Any] | None, doc("Its numbers, flat or as nested lists.")] = None
    parameters: Annotated[InputParameters, doc("How it is sent.")] = msgspec.field(
        default_factory=InputParameters
    )


class OutputParameters(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """How an output is wanted."""

    binary_data: Annotated[
        bool | None, doc("Whether its bytes follow the JSON; null as for the request.")
    ] = None


class WantedOutput(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """An output that is wanted."""

    name: Annotated[str, doc("Its name.")]
    parameters: Annotated[OutputParameters, doc("How it is wanted.")] = msgspec.field(
        default_factory=OutputParameters
    )


class SequenceParameters(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Which sequence a step belongs to."""

    sequence_id: Annotated[int | str, doc("A number or name that the client chooses; not 0 or empty.")] = 0
    sequence_start: Annotated[bool, doc("Whether this is the first step of the sequence.")] = False
    sequence_end: Annotated[bool, doc("Whether this is the last step; then its stream is deleted.")] = False
    position: Annotated[
        int | None, doc("How many tokens the sequence has had before; another number is an error.")
    ] = None
    binary_data_output: Annotated[bool, doc("Whether the bytes of the outputs follow the JSON.")] = False


class InferBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A step of a sequence."""

    inputs: Annotated[list[InputArray], doc("The inputs, each once.")]
    outputs: Annotated[list[WantedOutput] | None, doc("The outputs that are wanted; null for all.")] = None
    parameters: Annotated[SequenceParameters, doc("The sequence of the step.")] = msgspec.field(
        default_factory=SequenceParameters
    )
    id: Annotated[str | None, doc("An id of the request, which the answer repeats.")] = None


class Live(msgspec.Struct, kw_only=True):
    """Whether the server answers."""

    live: Annotated[bool, doc("Whether the server answers.")]


class ServerMetadata(msgspec.Struct, kw_only=True):
    """The server."""

    name: Annotated[str, doc("The name of the program.")]
    version: Annotated[str, doc("Its version.")]
    extensions: Annotated[list[str], doc("The extensions of the protocol that it knows.")]


class TensorMetadata(msgspec.Struct, kw_only=True):
    """An input or output of a model."""

    name: Annotated[str, doc("Its name.")]
    datatype: Annotated[str, doc("FP32 or INT64.")]
    shape: Annotated[list[int], doc("Its sizes; -1 is any number of tokens, the same in all tensors.")]


class ModelMetadata(msgspec.Struct, kw_only=True):
    """A model."""

    name: Annotated[str, doc("The name of the model.")]
    versions: Annotated[list[str], doc("Its versions: 1.")]
    platform: Annotated[str, doc("What computes it.")]
    inputs: Annotated[list[TensorMetadata], doc("What a step reads.")]
    outputs: Annotated[list[TensorMetadata], doc("What a step returns.")]


class ModelReady(msgspec.Struct, kw_only=True):
    """Whether a model answers."""

    name: Annotated[str, doc("The name of the model.")]
    ready: Annotated[bool, doc("Whether it answers.")]


class OutputArray(TensorMetadata, kw_only=True):
    """An output of a step."""

    data: Annotated[
        list[Any] | msgspec.UnsetType,
        doc(
            "Its numbers, row by row: an infinity is ±3.4e38, NaN null. Absent if its bytes follow the JSON."
        ),
    ] = msgspec.UNSET
    parameters: Annotated[
        dict[str, int] | msgspec.UnsetType, doc("`binary_data_size`, if its bytes follow the JSON.")
    ] = msgspec.UNSET


class SequenceState(msgspec.Struct, kw_only=True):
    """The sequence after a step."""

    position: Annotated[int, doc("How many tokens the sequence has had.")]
    stream: Annotated[str, doc("The name of its stream, for /v1/streams.")]


class InferResult(msgspec.Struct, kw_only=True):
    """What a step returned."""

    model_name: Annotated[str, doc("The name of the model.")]
    id: Annotated[str | msgspec.UnsetType, doc("The id of the request, if it had one.")] = msgspec.UNSET
    outputs: Annotated[list[OutputArray], doc("What the step returned.")]
    parameters: Annotated[SequenceState, doc("The sequence after the step.")]


def infer_body(body: bytearray, headers: Mapping[str, str], limits: Limits) -> InferBody:
    """The body of a step, with arrays as data; raises RefusedError for one that does not have its shape."""
    length = headers.get(HEADER, str(len(body)))
    if not length.isdecimal() or len(length) > LONGEST_NUMBER or int(length) > len(body):
        raise RefusedError(f"{HEADER} is {length!r:.40}; expected the bytes of the JSON, 0 to {len(body)}.")
    at = int(length)
    document = decoded(body[:at], InferBody)
    for given in document.inputs:
        end = at + (given.parameters.binary_data_size or 0)
        given.data = _array(given, body[at:end])
        at = end
    if at < len(body):
        raise RefusedError(f"{len(body) - at} bytes follow the inputs; expected none.", param="inputs")
    return document


def _array(given: InputArray, content: bytearray) -> np.ndarray:
    """The numbers of an input in its shape."""
    name = f"{given.name:.60}"
    if given.datatype not in TYPES:
        raise RefusedError(
            f"the datatype of {name} is {given.datatype!r:.40}; expected {' or '.join(TYPES)}.",
            param="inputs",
        )
    dtype = TYPES[given.datatype]
    size = given.parameters.binary_data_size
    if given.data is not None and size is None:
        array = as_numbers(name, given.data)
    elif given.data is None and len(content) == size and not size % dtype.itemsize:
        array = np.frombuffer(content, dtype)
    else:
        raise RefusedError(
            f"{name} has a binary_data_size of {size}, and {len(content)} bytes follow; expected "
            f"either data, or {dtype.itemsize} bytes for each number.",
            param="inputs",
        )
    # The axes are counted first: the product of a long list takes minutes.
    shaped = len(given.shape) <= MAX_AXES and min(given.shape, default=1) > 0
    if array.dtype.kind not in "fiu" or not shaped or array.size != math.prod(given.shape):
        raise RefusedError(
            f"{name} has {array.size} numbers of the type {array.dtype}, which do not make the shape "
            f"{given.shape!s:.80}; give {given.datatype} in that shape.",
            param="inputs",
        )
    return array.reshape(given.shape)


@ENDPOINTS.add("GET", "/v2/health/live", answer=Live, is_open=True)
async def live(request: RequestContext) -> Response:
    """Whether the server answers."""
    return json(Live(live=True))


@ENDPOINTS.add("GET", "/v2", answer=ServerMetadata)
async def server(request: RequestContext) -> Response:
    """The server and the extensions of the protocol that it knows."""
    extensions = ["binary_tensor_data", "sequence"]
    return json(ServerMetadata(name="xl-export", version=version("xl-export"), extensions=extensions))


@ENDPOINTS.add("GET", MODEL, VERSION, answer=ModelMetadata, refused=(400, 404, 503))
async def metadata(request: RequestContext) -> Response:
    """The inputs and outputs of a model."""
    model = request.server.model(request.path_params["name"])
    inputs, outputs = (
        [_tensor(model.session, tensor) for tensor in tensors] for tensors in step_signature(model.session)
    )
    platform = model.session.computed_by
    return json(
        ModelMetadata(name=model.name, versions=["1"], platform=platform, inputs=inputs, outputs=outputs)
    )


@ENDPOINTS.add(
    "GET",
    f"{MODEL}/ready",
    f"{VERSION}/ready",
    answer=ModelReady,
    instead={503: ModelReady},
    refused=(404,),
)
async def model_ready(request: RequestContext) -> Response:
    """Whether a model answers."""
    model = request.server.model(request.path_params["name"])
    is_ready = model.engine.alive
    return json(ModelReady(name=model.name, ready=is_ready), 200 if is_ready else 503)


@ENDPOINTS.add(
    "POST",
    f"{MODEL}/infer",
    f"{VERSION}/infer",
    queued=True,
    reads=infer_body,
    form=BINARY,
    answer=InferResult,
    refused=(404, 409, 410, 503, 507),
)
async def infer(request: RequestContext, body: InferBody) -> Response:
    """One step of a sequence."""
    model = request.server.model(request.path_params["name"])
    inputs = {each.name: each.data for each in body.inputs}
    if len(inputs) < len(body.inputs):
        raise RefusedError("an input is given twice; give each once.", param="inputs")
    names = [tensor.name for tensor in step_signature(model.session)[1]]
    usual = body.parameters.binary_data_output
    binary = dict.fromkeys(names, usual)
    if body.outputs:
        chosen = {each.name: each.parameters.binary_data for each in body.outputs}
        binary = {name: usual if own is None else own for name, own in chosen.items()}
    if unknown := binary.keys() - names:
        raise RefusedError(
            f"the model has no output {min(unknown)!r:.60}; expected some of {', '.join(names)}.",
            param="outputs",
        )
    parameters = body.parameters
    name = _stream(request.owner, model, parameters.sequence_id)
    work = StreamWork(model, request.owner, request.server.limits)

    step = work.sequence(
        name,
        inputs,
        parameters.position,
        start=parameters.sequence_start,
        end=parameters.sequence_end,
    )
    position, found = await work.lasting(step)
    size = sum(found[each].nbytes for each in binary)
    listed, contents = await off_loop(size, _outputs, found, binary)
    answer = InferResult(
        model_name=model.name,
        id=msgspec.UNSET if body.id is None else body.id,
        outputs=listed,
        parameters=SequenceState(position=position, stream=name),
    )
    head = await off_loop(size, to_json, answer)
    if contents:
        return Response(head + contents, headers={HEADER: str(len(head))}, media_type=BINARY)
    return of_json(head)


def _outputs(arrays: Mapping[str, np.ndarray], binary: Mapping[str, bool]) -> tuple[list[OutputArray], bytes]:
    """The outputs that are wanted, and the bytes of those that follow the JSON."""
    listed = []
    contents = []
    for name, follows in binary.items():
        array = arrays[name]
        output = OutputArray(name=name, datatype=NAMES[array.dtype], shape=list(array.shape))
        if follows:
            contents.append(array.tobytes())
            output.parameters = {"binary_data_size": array.nbytes}
        else:
            output.data = array.ravel()  # encoded as a list
        listed.append(output)
    return listed, b"".join(contents)


def _stream(owner: str, model: Model, sequence: int | str) -> str:
    """The name of the stream of a sequence, which no other API key or model has."""
    if sequence in (0, "") or len(str(sequence)) > LONGEST_ID:
        raise RefusedError(
            f"sequence_id is {sequence!r:.40}; expected a number other than 0, or a name of at most "
            f"{LONGEST_ID} characters, because each step continues the memory of a sequence.",
            param="sequence_id",
        )
    named = msgspec.json.encode([owner, model.name, model.session.memory_identity.layout, sequence])
    return f"sequence-{hashlib.sha256(named).hexdigest()[:24]}"


def _tensor(session: Session, tensor: TensorSpec) -> TensorMetadata:
    spec = session.spec
    tokens = session.rule.segment
    if is_language_model(session) or (
        tokens > 1 and (spec is None or not spec.fixed_rows or spec.fixed_tokens)
    ):
        tokens = -1
    shape = list(tensor.sizes(batch=1, tokens=tokens))
    return TensorMetadata(name=tensor.name, datatype=NAMES[np.dtype(tensor.dtype)], shape=shape)

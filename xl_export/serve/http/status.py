"""What operators ask for: which models there are, whether the server lives and is ready, metrics."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

import msgspec
from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.responses import Response

from runtimes.contract.session import is_language_model
from runtimes.contract.spec import POSITION_BYTES
from runtimes.contract.tensors import row_bytes
from xl_export.serve.http.base.context import RequestContext, json
from xl_export.serve.http.base.endpoint import Endpoints
from xl_export.serve.http.base.errors import doc
from xl_export.serve.http.base.server import Model, Server

ENDPOINTS = Endpoints()
# The prefix of every metric; the rest of a name is the one that other model servers use.
PREFIX = "xl_export_"
# Of `RequestMetrics`: the name of each, what it is, and the attribute.
HISTOGRAMS = (
    ("time_to_first_token_seconds", "Time from a request to its first token.", "to_first"),
    ("inter_token_latency_seconds", "Time between two tokens of a stream.", "between"),
    ("e2e_request_latency_seconds", "Time from a request to its last token.", "whole"),
    (
        "request_queue_time_seconds",
        "Time that a task waits for its first row. Each choice is a task, and so is a shared prompt. Tasks "
        "cancelled in the queue and texts of /v1/score are not counted.",
        "queued",
    ),
)
COUNTERS = (
    ("prompt_tokens", "Tokens of prompts.", "prompt_tokens"),
    ("cached_prompt_tokens", "Tokens of prompts that were in the prefix cache.", "cached_tokens"),
    ("generation_tokens", "Tokens that were drawn.", "generated_tokens"),
)


class Health(msgspec.Struct, kw_only=True):
    """Whether the engines run."""

    status: Annotated[Literal["ok", "failed"], doc("Whether all engines run.")]
    failed: Annotated[list[str], doc("The models whose engine does not run.")]


class Ready(msgspec.Struct, kw_only=True):
    """Whether requests are answered."""

    ready: Annotated[bool, doc("Whether requests are answered.")]


class ServerMetrics(msgspec.Struct, kw_only=True):
    """The metrics of each model."""

    object: Annotated[Literal["server"], doc("The kind of this document.")] = "server"
    requests: Annotated[int, doc("How many requests are served or wait.")]
    streams_survive: Annotated[bool, doc("Whether streams continue after a restart of the server.")]
    streams: Annotated[dict[str, float], doc("The metrics of all streams, by their names in /metrics.")]
    models: Annotated[
        dict[str, dict[str, float]], doc("The metrics of each model, by their names in /metrics.")
    ]


class VocabularyFacts(msgspec.Struct, kw_only=True):
    """The vocabulary of a model."""

    kind: Annotated[str, doc("What tokens are: char, word, subword, ids or byte.")]
    size: Annotated[int, doc("How many tokens there are.")]
    special: Annotated[dict[str, int], doc("Special tokens, by their meaning.")]


class ModelFacts(msgspec.Struct, kw_only=True):
    """What is known of a model beyond OpenAI's fields."""

    identity: Annotated[str, doc("The hash of the artefact.")]
    mem_len: Annotated[int, doc("How many tokens the memory holds.")]
    segment: Annotated[int, doc("The most tokens of one step.")]
    mask: Annotated[str, doc("Which positions a token sees.")]
    vocabulary: Annotated[
        VocabularyFacts | None,
        doc("What tokens are, and which are special; null for a model with named inputs."),
    ]
    parameters: Annotated[int | None, doc("How many parameters the model has; null if unknown.")]
    precision: Annotated[str, doc("The number format of the weights.")]
    memory_precision: Annotated[str, doc("The number format of the memory.")]
    bytes_per_stream: Annotated[int, doc("The memory of one stream.")]
    growing_bytes_per_token: Annotated[
        int | None,
        doc("What each token would add to a growing cache of keys and values in fp32; null if unknown."),
    ]
    sampling: Annotated[dict[str, Any], doc("The sampling settings that the model recommends.")]
    computed_by: Annotated[str, doc("The engine that computes the model.")]
    threads: Annotated[int | None, doc("How many CPU threads compute a step; null if PyTorch chooses them.")]
    rows_independent: Annotated[bool, doc("Whether an answer is the same to the bit under any load.")]
    rows_dependence: Annotated[str | None, doc("Why rows_independent is false; null otherwise.")]


class ModelDocument(msgspec.Struct, kw_only=True):
    """A model that is served."""

    id: Annotated[str, doc("The name of the model.")]
    object: Annotated[Literal["model"], doc("The kind of this document.")] = "model"
    created: Annotated[int, doc("When it was opened, in seconds since 1970.")]
    owned_by: Annotated[str, doc("The owner of the model; the same for all models.")] = "xl-export"
    max_model_len: Annotated[int, doc("The most tokens of the prompts of a request. A stream has no end.")]
    xl_export: Annotated[ModelFacts, doc("What is known of the model beyond OpenAI's fields.")]


class ModelList(msgspec.Struct, kw_only=True):
    """The models that are served; the first one answers requests without a name."""

    object: Annotated[Literal["list"], doc("The kind of this document.")] = "list"
    data: Annotated[list[ModelDocument], doc("The models; the first one answers requests without a name.")]


@ENDPOINTS.add("GET", "/health", answer=Health, instead={503: Health}, is_open=True)
async def health(request: RequestContext) -> Response:
    """Whether the engines run."""
    dead = [name for name, model in request.server.models.items() if not model.engine.alive]
    return json(Health(status="failed" if dead else "ok", failed=dead), 503 if dead else 200)


@ENDPOINTS.add("GET", "/ready", answer=Ready, instead={503: Ready}, is_open=True)
@ENDPOINTS.add("GET", "/v2/health/ready", answer=Ready, instead={503: Ready}, is_open=True)
async def ready(request: RequestContext) -> Response:
    """Whether requests are answered."""
    server = request.server
    is_ready = bool(server.models) and not server.stopping
    is_ready = is_ready and all(model.engine.alive for model in server.models.values())
    return json(Ready(ready=is_ready), 200 if is_ready else 503)


@ENDPOINTS.add("GET", "/metrics", content="text/plain")
async def metrics(request: RequestContext) -> Response:
    """Metrics for Prometheus."""
    text = generate_latest(_Metrics(request.server))
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


class _Metrics(Collector):
    """All metrics of a server. They change only on the event loop."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def collect(self) -> Iterator[Metric]:
        """Called by prometheus_client."""
        server = self._server
        model = ["model_name"]
        for name, text, attribute in HISTOGRAMS:
            histograms = HistogramMetricFamily(PREFIX + name, text, labels=model)
            for label, served in server.models.items():
                histogram = getattr(served.requests, attribute)
                histograms.add_metric([label], histogram.buckets(), histogram.sum)
            yield histograms
        for name, text, attribute in COUNTERS:
            counter = CounterMetricFamily(PREFIX + name, text, labels=model)
            for label, served in server.models.items():
                counter.add_metric([label], getattr(served.requests, attribute))
            yield counter
        reasons = [*model, "finished_reason"]
        ended = CounterMetricFamily(f"{PREFIX}requests_ended", "Choices that ended.", labels=reasons)
        for label, served in server.models.items():
            for reason, count in sorted(served.requests.ended.items()):
                ended.add_metric([label, reason], count)
        yield ended
        found: dict[str, Metric] = {}
        for label, served in server.models.items():
            for name, text, value in served.metrics():
                if name not in found:
                    kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
                    found[name] = kind(PREFIX + name.removesuffix("_total"), text, labels=model)
                found[name].add_metric([label], value)  # type: ignore[attr-defined]
        yield from found.values()
        for name, text, value in server.store.metrics():
            kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            yield kind(PREFIX + name.removesuffix("_total"), text, value=value)
        http = CounterMetricFamily(
            f"{PREFIX}http_requests", "Requests that were answered.", labels=["path", "status"]
        )
        for labels, count in sorted(server.answered.items()):
            http.add_metric(labels, count)
        yield http
        open_now = "Requests that are served or wait."
        yield GaugeMetricFamily(f"{PREFIX}http_requests_open", open_now, value=server.requests.total)


@ENDPOINTS.add("GET", "/v1/server", answer=ServerMetrics)
async def server_metrics(request: RequestContext) -> Response:
    """The metrics of each model as JSON."""
    server = request.server
    found = {
        name: {"bytes_per_stream": _bytes_per_stream(model)}
        | {key: value for key, _, value in model.metrics()}
        for name, model in server.models.items()
    }
    answer = ServerMetrics(
        requests=server.requests.total,
        streams_survive=server.state is not None,
        streams={key: value for key, _, value in server.store.metrics()},
        models=found,
    )
    return json(answer)


@ENDPOINTS.add("GET", "/v1/models", answer=ModelList, link=("name", "/data/0/id"))
async def models(request: RequestContext) -> Response:
    """The models that are served."""
    most = request.server.limits.prompt_tokens
    return json(ModelList(data=[facts(model, most) for model in request.server.models.values()]))


@ENDPOINTS.add("GET", "/v1/models/{name}", answer=ModelDocument, refused=(404, 503))
async def model(request: RequestContext) -> Response:
    """One model."""
    server = request.server
    return json(facts(server.model(request.path_params["name"]), server.limits.prompt_tokens))


def facts(model: Model, prompt_tokens: int) -> ModelDocument:
    """A model as OpenAI lists it, with what is known about it under `xl_export`."""
    session = model.session
    spec = session.spec
    vocabulary: VocabularyFacts | None = None
    growing: int | None = None
    if is_language_model(session):
        vocab = session.vocab
        growing = None if spec is None else spec.model.growing_bytes_per_token
        vocabulary = VocabularyFacts(kind=vocab.kind, size=vocab.size, special=vocab.special.to_json())
    dependence = model.engine.dependence
    own = ModelFacts(
        identity=session.identity,
        mem_len=session.rule.mem_len,
        segment=session.rule.segment,
        mask=session.rule.mask,
        vocabulary=vocabulary,
        parameters=None if spec is None else spec.model.parameters,
        precision="fp32" if spec is None else spec.precision,
        memory_precision="fp32" if spec is None else spec.memory_precision,
        bytes_per_stream=_bytes_per_stream(model),
        growing_bytes_per_token=growing,
        sampling=session.sampler.changed(),
        computed_by=session.computed_by,
        threads=model.threads,
        rows_independent=dependence is None,
        rows_dependence=dependence,
    )
    return ModelDocument(id=model.name, created=model.created, max_model_len=prompt_tokens, xl_export=own)


def _bytes_per_stream(model: Model) -> int:
    return POSITION_BYTES + row_bytes(model.session.state)

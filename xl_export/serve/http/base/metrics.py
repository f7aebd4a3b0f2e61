"""The figures of the server in the format of Prometheus, under the names that other servers of models use.

They change on the event loop alone, and a token adds to them without a lock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Protocol

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from xl_export.serve.core.facts import QUEUED, Histogram

PREFIX = "xl_export_"


TO_FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 30.0)
BETWEEN = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0)
WHOLE = (0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 300.0)


class Figures:
    """What requests to one model have cost. queued: seconds in the queue, of each engine that it has had."""

    def __init__(self) -> None:
        self.to_first, self.between, self.whole = Histogram(TO_FIRST), Histogram(BETWEEN), Histogram(WHOLE)
        self.prompt_tokens = self.cached_tokens = self.generated_tokens = 0
        self.ended: Counter[str] = Counter()
        self.queued: list[Histogram] = []

    def note_tokens(self, gap: float, times: int) -> None:
        """So many drawn tokens arrived, each so many seconds after the one before it in its stream."""
        self.generated_tokens += times
        self.between.observe(gap, times)


class HasFigures(Protocol):
    """What they need of a model."""

    def figures(self) -> Iterator[tuple[str, str, float]]: ...


class Counted(Protocol):
    """Something that is counted; see `xl_export.serve.http.base.limits.Load`."""

    total: int


class HasModels(Protocol):
    """What the figures need of a server."""

    @property
    def models(self) -> Mapping[str, HasFigures]: ...

    @property
    def requests(self) -> Counted: ...
    @property
    def sockets(self) -> Counted: ...


class Metrics:
    """All figures of a server."""

    def __init__(self, server: HasModels) -> None:
        self._server = server
        self._models: dict[str, Figures] = {}
        self.answered: Counter[tuple[str, str]] = Counter()  # by path and status
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def of(self, model: str) -> Figures:
        """The figures of the model of that name; they go on when it is reloaded."""
        return self._models.setdefault(model, Figures())

    def text(self) -> bytes:
        """The answer to a scrape."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Called by prometheus_client."""
        yield from self._of_requests()
        yield from self._of_engines()
        http = CounterMetricFamily(
            f"{PREFIX}http_requests", "Requests that were answered.", labels=("path", "status")
        )
        for (path, status), count in sorted(self.answered.items()):
            http.add_metric((path, status), count)
        yield http
        yield GaugeMetricFamily(
            f"{PREFIX}http_requests_open",
            "Requests that are served or wait.",
            value=self._server.requests.total,
        )
        yield GaugeMetricFamily(
            f"{PREFIX}http_websockets_open", "WebSockets that are open.", value=self._server.sockets.total
        )

    def _of_requests(self) -> Iterator[Metric]:
        histograms = {
            "time_to_first_token_seconds": ("Time from a request to its first token.", "to_first"),
            "inter_token_latency_seconds": ("Time between two tokens of a stream.", "between"),
            "e2e_request_latency_seconds": ("Time from a request to its last token.", "whole"),
        }
        for name, (text, attribute) in histograms.items():
            family = HistogramMetricFamily(PREFIX + name, text, labels=("model_name",))
            for model, figures in self._models.items():
                histogram = getattr(figures, attribute)
                family.add_metric((model,), histogram.buckets(), histogram.sum)
            yield family
        queued = HistogramMetricFamily(
            f"{PREFIX}request_queue_time_seconds",
            "Time from a task to its first row. Each of several choices is a task, and the prompt that they "
            "share is one more; tasks that leave before and the texts of /v1/score are not counted.",
            labels=("model_name",),
        )
        for model, figures in self._models.items():
            total = Histogram(QUEUED)
            for histogram in figures.queued:  # an engine that drains counts beside the one in its place
                total.add(histogram)
            queued.add_metric((model,), total.buckets(), total.sum)
        yield queued
        counters = {
            "prompt_tokens": ("Tokens of prompts.", "prompt_tokens"),
            "cached_prompt_tokens": ("Tokens of prompts that were in the prefix cache.", "cached_tokens"),
            "generation_tokens": ("Tokens that were drawn.", "generated_tokens"),
        }
        for name, (text, attribute) in counters.items():
            counter = CounterMetricFamily(PREFIX + name, text, labels=("model_name",))
            for model, figures in self._models.items():
                counter.add_metric((model,), getattr(figures, attribute))
            yield counter
        ended = CounterMetricFamily(
            f"{PREFIX}requests_ended", "Choices that ended.", labels=("model_name", "finished_reason")
        )
        for model, figures in self._models.items():
            for reason, count in sorted(figures.ended.items()):
                ended.add_metric((model, reason), count)
        yield ended

    def _of_engines(self) -> Iterator[Metric]:
        found: dict[str, Metric] = {}
        for name, model in self._server.models.items():
            for metric, text, value in model.figures():
                family = found.get(metric)
                if family is None:
                    kind = CounterMetricFamily if metric.endswith("_total") else GaugeMetricFamily
                    full = PREFIX + metric.removesuffix("_total")
                    family = found[metric] = kind(full, text, labels=("model_name",))
                family.add_metric((name,), value)  # type: ignore[attr-defined]
        yield from found.values()

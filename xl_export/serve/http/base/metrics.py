"""The figures of the server in the format of Prometheus, under the names that other servers of models use.

They change only on the event loop, so a token adds to them without a lock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from xl_export.serve.core.admission import Quota
from xl_export.serve.core.settings import Histogram
from xl_export.serve.http.base.bridge import Figures
from xl_export.serve.http.base.models import Model

PREFIX = "xl_export_"


class Metrics:
    """All figures of a server.

    models: those that are served now. requests, sockets: what is open now.
    """

    def __init__(self, models: Mapping[str, Model], requests: Quota, sockets: Quota) -> None:
        self._served = models
        self._requests = requests
        self._sockets = sockets
        self._models: dict[str, Figures] = {}
        self.answered: Counter[tuple[str, str]] = Counter()  # by path and status
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def of(self, model: str) -> Figures:
        """The figures of the model of that name; they continue when it is reloaded."""
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
            value=self._requests.total,
        )
        yield GaugeMetricFamily(
            f"{PREFIX}http_websockets_open", "WebSockets that are open.", value=self._sockets.total
        )

    def _of_requests(self) -> Iterator[Metric]:
        histograms: dict[str, tuple[str, Callable[[Figures], Histogram]]] = {
            "time_to_first_token_seconds": ("Time from a request to its first token.", lambda f: f.to_first),
            "inter_token_latency_seconds": ("Time between two tokens of a stream.", lambda f: f.between),
            "e2e_request_latency_seconds": ("Time from a request to its last token.", lambda f: f.whole),
            "request_queue_time_seconds": (
                "Time from a task to its first row. Each of several choices is a task, and the prompt that "
                "they share is one more; tasks that leave before and the texts of /v1/score are not counted.",
                Figures.queue_times,
            ),
        }
        for name, (text, histogram_of) in histograms.items():
            family = HistogramMetricFamily(PREFIX + name, text, labels=("model_name",))
            for model, figures in self._models.items():
                histogram = histogram_of(figures)
                family.add_metric((model,), histogram.buckets(), histogram.sum)
            yield family
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
        for name, model in self._served.items():
            for metric, text, value in model.figures():
                family = found.get(metric)
                if family is None:
                    kind = CounterMetricFamily if metric.endswith("_total") else GaugeMetricFamily
                    full = PREFIX + metric.removesuffix("_total")
                    family = found[metric] = kind(full, text, labels=("model_name",))
                family.add_metric((name,), value)  # type: ignore[attr-defined]
        yield from found.values()

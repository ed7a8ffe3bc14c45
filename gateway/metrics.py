"""Prometheus metrics of a gateway. Labels are bounded and contain no tenant, user or prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import TypeVar, cast

from prometheus_client import Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from millrace.gateway.streams.deliveries import Deliveries
from millrace.gateway.streams.fleet_view import FleetView
from millrace.gateway.streams.stream import OpenStream, TokenGaps, status_of
from millrace.gateway.streams.streams import StreamTable
from millrace.gateway.tenancy.limits import Limiter
from millrace.runtime.histogram import DURATION_S, FIRST_TOKEN_S, PER_TOKEN_S
from millrace.runtime.metrics_server import new_registry
from millrace.runtime.tracing import recorded_trace_id
from millrace.schemas.frames import Done
from millrace.schemas.jobs import Source
from millrace.schemas.records import Status
from millrace.schemas.tenants import LimitSet

# HTTP statuses of server errors.
SERVER_FAULTS = (500, 502, 503, 504)
_M = TypeVar("_M", Counter, Histogram)


class Metrics:
    """Metrics of one gateway, with a registry of its own so that several gateways can live in one
    process.
    """

    def __init__(self) -> None:
        self.registry = new_registry()
        self.gaps = TokenGaps()
        self._series: dict[tuple[Counter | Histogram, tuple[str, ...]], Counter | Histogram] = {}
        self.registry.register(self.gaps)
        counter = partial(Counter, registry=self.registry)
        histogram = partial(Histogram, labelnames=["model"], registry=self.registry)
        self.requests = counter(
            "millrace_http_requests", "HTTP requests by route and status", ["route", "status"]
        )
        self.refusals = counter(
            "millrace_ws_errors", "Error messages sent on WebSockets, by code", ["code"]
        )
        self.refused_requests = counter(
            "millrace_refused_requests",
            "Requests that were refused before they were jobs, by route, status and code",
            ["route", "status", "code"],
        )
        self._generations = counter(
            "millrace_generations",
            "Generations that ended, by model, door and outcome",
            ["model", "source", "outcome"],
        )
        self._prompt_tokens = counter(
            "millrace_prompt_tokens", "Prompt tokens of generations that ended well", ["model"]
        )
        self._generation_tokens = counter(
            "millrace_generation_tokens", "Tokens given out to clients", ["model"]
        )
        self._repeated_answers = counter(
            "millrace_repeated_answers",
            "Answers repeated for an Idempotency-Key, which do not count as generations",
            ["model"],
        )
        self._replays = counter("millrace_replays", "Requests for missing frames")
        self._resumes = counter(
            "millrace_resumes", "Returns of clients to their streams", ["model"]
        )
        self._stalls = counter(
            "millrace_stalls",
            "Gaps of a second or more between two deliveries of an answer's tokens",
            ["model"],
        )
        self._stalled_s = counter(
            "millrace_stalled_seconds", "Total length of those gaps", ["model"]
        )
        self._reruns = counter(
            "millrace_moved_generations",
            "Generations of which the client saw more than one run",
            ["model"],
        )
        self._first_token_s = histogram(
            "millrace_time_to_first_token_seconds",
            "From receipt to the first token given out",
            buckets=FIRST_TOKEN_S,
        )
        self._per_token_s = histogram(
            "millrace_time_per_output_token_seconds",
            "Mean time per token after the first, one observation for each generation",
            buckets=PER_TOKEN_S,
        )
        self._whole_s = histogram(
            "millrace_e2e_request_latency_seconds",
            "From receipt to the end",
            buckets=DURATION_S,
        )

    def watch(
        self, streams: StreamTable, fleet: FleetView, limiter: Limiter, deliveries: Deliveries
    ) -> None:
        """Report the current state of these objects at every scrape."""
        self.watch_sizes(
            {
                "millrace_open_streams": (
                    "Streams with a waiting client",
                    lambda: streams.num_served,
                ),
                "millrace_live_workers": (
                    "Workers with a recent heartbeat",
                    lambda: len(fleet.live_workers()),
                ),
            }
        )
        self.registry.register(_Queues(fleet))
        self.registry.register(_Losses(limiter, deliveries))

    def watch_sizes(self, sizes: Mapping[str, tuple[str, Callable[[], int]]]) -> None:
        """Register a gauge for each name, with its description and a function that returns its
        value.
        """
        for name, (what, count) in sizes.items():
            Gauge(name, what, registry=self.registry).set_function(count)

    def know_models(self, models: Iterable[str]) -> None:
        """Export the counters of these models at 0 from now on: Prometheus sees no increase in a
        series that begins at 1.
        """
        tokens = (self._generation_tokens, self._prompt_tokens, self._repeated_answers)
        troubles = (self._resumes, self._stalls, self._stalled_s, self._reruns)
        times = (self._first_token_s, self._per_token_s, self._whole_s)
        for model in models:
            for counter in (*tokens, *troubles):
                self._of(counter, model)
            for histogram in times:
                self._of(histogram, model)
            for source in Source:
                for status in Status:
                    self._of(self._generations, model, source.value, status.value)

    def know_routes(self, routes: Iterable[str]) -> None:
        """Export the error counters of these routes at 0 from now on."""
        for route in routes:
            for status in SERVER_FAULTS:
                self._of(self.requests, route, str(status))

    def count_end(self, stream: OpenStream, now_s: float) -> None:
        """Count a stream that has ended."""
        model, delivery = stream.job.model, stream.delivery
        outcome = stream.outcome or status_of(stream).value
        self._of(self._generations, model, stream.job.source.value, outcome).inc()
        self._of(self._generation_tokens, model).inc(delivery.num_delivered)
        # Most answers add nothing, but the series exists from the first answer on.
        for counter, amount in (
            (self._resumes, delivery.num_resumes),
            (self._stalls, delivery.num_stalls),
            (self._stalled_s, delivery.stalled_s),
            (self._reruns, stream.reader.num_epochs > 1),
        ):
            of_model = self._of(counter, model)
            if amount:
                of_model.inc(amount)
        if delivery.num_replays:
            self._replays.inc(delivery.num_replays)
        trace_id = recorded_trace_id(stream.job.traceparent)
        exemplar = {"trace_id": trace_id} if trace_id else None
        self._of(self._whole_s, model).observe(now_s - delivery.received_s, exemplar)
        usage = stream.reader.usage
        if usage is not None and isinstance(stream.reader.terminal, Done):
            self._of(self._prompt_tokens, model).inc(usage.prompt_tokens)
        first_s, last_s = delivery.first_token_s, delivery.last_token_s
        if first_s is None or last_s is None:
            return
        self._of(self._first_token_s, model).observe(first_s - delivery.received_s, exemplar)
        if stream.num_seen > 1:
            seconds = (last_s - first_s) / (stream.num_seen - 1)
            self._of(self._per_token_s, model).observe(seconds, exemplar)

    def count_return(self, model: str) -> None:
        """Count a client that returned for the end of an answer, which was counted before."""
        self._of(self._resumes, model).inc()

    def count_repeated_answer(self, model: str) -> None:
        """Count a request that gets the answer of an earlier request with its idempotency key."""
        self._of(self._repeated_answers, model).inc()

    def count_request(self, route: str, status: int) -> None:
        """Count an HTTP request that was answered."""
        self._of(self.requests, route, str(status)).inc()

    def _of(self, metric: _M, *labels: str) -> _M:
        """Return the series of ``metric`` with these labels, cached: Prometheus' client takes a
        lock and several copies to find it.
        """
        key = (metric, labels)
        series = self._series.get(key)
        if series is None:
            series = self._series[key] = metric.labels(*labels)
        return cast("_M", series)


class _Queues(Collector):
    """Queue metrics of each model from schedulers' reports, for a cluster's autoscalers."""

    def __init__(self, fleet: FleetView) -> None:
        self._fleet = fleet

    def collect(self) -> Iterator[Metric]:
        queued = GaugeMetricFamily(
            "millrace_queued_jobs", "Jobs that wait in a model's queue", labels=["model"]
        )
        published = GaugeMetricFamily(
            "millrace_published_jobs",
            "Jobs in a model's queue that services published, which its bound does not count",
            labels=["model"],
        )
        bound = GaugeMetricFamily(
            "millrace_queue_bound",
            "Maximum number of jobs before the queue refuses more",
            labels=["model"],
        )
        desired = GaugeMetricFamily(
            "millrace_desired_workers", "Workers that the schedulers want", labels=["model"]
        )
        oldest = GaugeMetricFamily(
            "millrace_oldest_wait_seconds", "Waiting time of the oldest job", labels=["model"]
        )
        ttft = GaugeMetricFamily(
            "millrace_predicted_ttft_seconds",
            "Predicted time to the first token of a job that arrives now",
            labels=["model", "tier"],
        )
        for status in self._fleet.queues():
            queued.add_metric([status.model], status.num_queued)
            published.add_metric([status.model], status.num_published)
            bound.add_metric([status.model], status.bound)
            oldest.add_metric([status.model], status.oldest_wait_s)
            wanted = self._fleet.desired_workers(status.model)
            if wanted is not None:
                desired.add_metric([status.model], wanted)
            for tier, ttft_ms in status.ttft_ms.items():
                ttft.add_metric([status.model, tier.value], ttft_ms / 1e3)
        yield from (queued, published, bound, desired, oldest, ttft)


class _Losses(Collector):
    """Counters of refused and abandoned requests, and of requests served without Redis."""

    def __init__(self, limiter: Limiter, deliveries: Deliveries) -> None:
        self._limiter = limiter
        self._deliveries = deliveries

    def collect(self) -> Iterator[Metric]:
        refused = CounterMetricFamily(
            "millrace_limit_refusals", "Requests that a limit refused, by limit", labels=["limit"]
        )
        for limit in LimitSet.__struct_fields__:
            refused.add_metric([limit], self._limiter.num_refusals[limit])
        yield refused
        yield CounterMetricFamily(
            "millrace_degraded_reservations",
            "Reservations that were made while Redis was unreachable",
            self._limiter.num_degraded,
        )
        yield CounterMetricFamily(
            "millrace_lost_settlements",
            "Settlements that were given up while Redis was unreachable",
            self._limiter.settlements.num_lost,
        )
        yield CounterMetricFamily(
            "millrace_lost_delivery_records",
            "Delivery records that were given up while the message bus was unreachable",
            self._deliveries.num_lost,
        )

"""Prometheus metrics of the workers of a process, read from their state at each scrape.

Names are those of other inference engines where they have one. Request figures begin at the
dispatch to the worker; the gateways' figures begin at the receipt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from millrace.engine.types import EngineStats
from millrace.runtime.histogram import Histogram
from millrace.schemas.records import Status
from millrace.workers.host.worker import Worker
from millrace.workers.process.engine_figures import COUNTERS, GAUGES, HELP, TIERS
from millrace.workers.process.keeper import EngineKeeper

_LABELS = ("model", "worker")


class _Watched(NamedTuple):
    labels: tuple[str, str]
    engine: EngineKeeper
    worker: Worker


class WorkerMetrics(Collector):
    """Metrics of all workers of the process, labelled by name and model, never by tenant or
    request.
    """

    def __init__(self) -> None:
        self._workers: list[_Watched] = []

    def watch(self, name: str, model: str, engine: EngineKeeper, worker: Worker) -> None:
        """Include a worker in the metrics."""
        self._workers.append(_Watched((model, name), engine, worker))

    def forget(self, worker: Worker) -> None:
        """Remove a worker that has ended; do nothing if it is not there."""
        self._workers = [one for one in self._workers if one.worker is not worker]

    @property
    def num_workers(self) -> int:
        return len(self._workers)

    @property
    def all_drain(self) -> bool:
        return all(one.worker.requests.draining for one in self._workers)

    def collect(self) -> Iterator[Metric]:
        stats = [(one.labels, one.engine.stats) for one in self._workers]
        for name, read in GAUGES.items():
            gauge = GaugeMetricFamily(name, HELP[name], labels=_LABELS)
            for labels, of_engine in stats:
                gauge.add_metric(labels, read(of_engine))
            yield gauge
        for field, name in COUNTERS.items():
            counter = CounterMetricFamily(name, HELP[name], labels=_LABELS)
            for labels, of_engine in stats:
                counter.add_metric(labels, getattr(of_engine, field))
            yield counter
        yield self._tier_hits()
        yield self._expert_choices()
        yield from self._requests()
        yield from self._devices()
        yield from self._times()

    def _tier_hits(self) -> Metric:
        hits = CounterMetricFamily(
            "millrace_prefix_cache_tier_hits",
            "Tokens found in the prefix cache, by the tier that held them",
            labels=[*_LABELS, "source"],
        )
        for one in self._workers:
            for source, num_tokens in _hits_by_tier(one.engine.stats).items():
                hits.add_metric([*one.labels, source], num_tokens)
        return hits

    def _expert_choices(self) -> Metric:
        choices = CounterMetricFamily(
            "millrace_expert_choices",
            "Times that an expert was chosen for a token in a layer, by the expert's number",
            labels=[*_LABELS, "expert"],
        )
        for one in self._workers:
            for expert, count in enumerate(one.engine.stats.expert_choices):
                choices.add_metric([*one.labels, str(expert)], count)
        return choices

    def _requests(self) -> Iterator[Metric]:
        waiting = GaugeMetricFamily(
            "millrace_num_requests_waiting",
            "Requests of the worker that are not in the engine's batch",
            labels=_LABELS,
        )
        ending = GaugeMetricFamily(
            "millrace_num_requests_ending",
            "Requests that are over and not yet acknowledged in the queue",
            labels=_LABELS,
        )
        draining = GaugeMetricFamily(
            "millrace_worker_draining", "1 while the worker takes no new work", labels=_LABELS
        )
        devices = GaugeMetricFamily(
            "millrace_worker_devices", "Devices that compute together", labels=_LABELS
        )
        restarts = CounterMetricFamily(
            "millrace_engine_restarts", "Engines started to replace an engine", labels=_LABELS
        )
        ended = CounterMetricFamily(
            "millrace_worker_requests",
            "Attempts that ended their request, by the request's status",
            labels=[*_LABELS, "status"],
        )
        orphaned = CounterMetricFamily(
            "millrace_orphaned_requests",
            "Requests cancelled because their gateway was gone and no client resumed them",
            labels=_LABELS,
        )
        for labels, engine, worker in self._workers:
            requests = worker.requests
            orphaned.add_metric(labels, worker.orphans.num_found)
            num_waiting = requests.num_running - engine.stats.num_running
            waiting.add_metric(labels, max(0, num_waiting))
            ending.add_metric(labels, requests.num_ending)
            draining.add_metric(labels, requests.draining)
            devices.add_metric(labels, engine.num_devices)
            restarts.add_metric(labels, engine.num_restarts)
            for status in Status:
                ended.add_metric([*labels, status.value], requests.times.ended[status])
        yield from (waiting, ending, draining, devices, restarts, ended, orphaned)

    def _devices(self) -> Iterator[Metric]:
        """Yield the figures of device drivers; a CPU has none."""
        labels = [*_LABELS, "device"]
        share = GaugeMetricFamily(
            "millrace_device_utilisation_ratio",
            "Share of the last moments in which the device was busy, as its driver reports",
            labels=labels,
        )
        used = GaugeMetricFamily(
            "millrace_device_memory_used_bytes",
            "Memory of the device in use",
            labels=labels,
        )
        total = GaugeMetricFamily(
            "millrace_device_memory_total_bytes", "Memory of the device", labels=labels
        )
        for one in self._workers:
            reading = one.worker.device.latest
            if reading.name:
                share.add_metric([*one.labels, reading.name], reading.share)
                used.add_metric([*one.labels, reading.name], reading.memory_bytes)
                total.add_metric([*one.labels, reading.name], reading.memory_total_bytes)
        yield from (share, used, total)
        counted = CounterMetricFamily(
            "millrace_device_energy_joules",
            "Energy of the device, idle time included, as its counter reports",
            labels=_LABELS,
        )
        given = CounterMetricFamily(
            "millrace_charged_energy_joules",
            "Part of the device's energy charged to requests",
            labels=_LABELS,
        )
        for one in self._workers:
            energy = one.worker.energy.totals
            if energy is not None:
                counted.add_metric(one.labels, energy.counted_j)
                given.add_metric(one.labels, max(energy.charged_j, 0.0))
        yield from (counted, given)
        lost = CounterMetricFamily(
            "millrace_lost_worker_samples",
            "Samples that the message bus did not accept; the next sample covers their time",
            labels=_LABELS,
        )
        for one in self._workers:
            lost.add_metric(one.labels, one.worker.num_samples_lost)
        yield lost

    def _times(self) -> Iterator[Metric]:
        yield self._histogram(
            "millrace_engine_step_duration_seconds",
            "Duration of engine steps",
            lambda one: one.engine.step_s,
        )
        yield self._histogram(
            "millrace_engine_time_to_first_token_seconds",
            "Time from the dispatch to a worker to the first token",
            lambda one: one.worker.requests.times.first_token_s,
        )
        yield self._histogram(
            "millrace_engine_inter_token_latency_seconds",
            "Time between tokens as the engine makes them",
            lambda one: one.worker.requests.times.gap_s,
        )
        yield self._histogram(
            "millrace_request_queue_time_seconds",
            "Engine wait: time from the dispatch to a worker until the request is in its batch",
            lambda one: one.worker.requests.times.engine_wait_s,
        )
        yield self._histogram(
            "millrace_request_prefill_time_seconds",
            "Time from the batch to the first token",
            lambda one: one.worker.requests.times.prefill_s,
        )
        yield self._histogram(
            "millrace_request_decode_time_seconds",
            "Time from the first token to the last",
            lambda one: one.worker.requests.times.decode_s,
        )

    def _histogram(
        self, name: str, what: str, tally: Callable[[_Watched], Histogram]
    ) -> HistogramMetricFamily:
        family = HistogramMetricFamily(name, what, labels=_LABELS)
        for one in self._workers:
            tally(one).add_to(family, one.labels)
        return family


def _hits_by_tier(stats: EngineStats) -> dict[str, int]:
    brought = {source: getattr(stats, field) for field, source in TIERS.items()}
    return {"device": stats.prefix_hit_tokens - sum(brought.values()), **brought}

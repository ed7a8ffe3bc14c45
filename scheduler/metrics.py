"""What Prometheus sees of a scheduler, read at each scrape from what its parts know anyway."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from scheduler.dispatch.dispatcher import Dispatcher
from scheduler.jobs.scheduled_job import Phase
from scheduler.scheduler import Scheduler
from schemas.jobs import Tier

_Family = TypeVar("_Family", CounterMetricFamily, GaugeMetricFamily)


class SchedulerMetrics(Collector):
    """Labels are models of the catalogue, tiers and words of ours: no tenant, no request."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def collect(self) -> Iterator[Metric]:
        yield from self._queues()
        yield from self._workers()
        yield from self._outcomes()
        yield from self._times()

    def _queues(self) -> Iterator[Metric]:
        queue_estimates = self._scheduler.queue_estimates
        yield self._by_model(
            GaugeMetricFamily(
                "millrace_scheduler_queued_jobs",
                "Jobs that wait for a model, here and in the queue, as last counted",
                labels=["model"],
            ),
            lambda dispatcher: queue_estimates[dispatcher.model].num_queued,
        )
        oldest = GaugeMetricFamily(
            "millrace_scheduler_oldest_wait_seconds",
            "How long the job that was received first has waited, of those that are here",
            labels=["model", "tier"],
        )
        for dispatcher in self._dispatchers():
            for tier, wait_s in queue_estimates[dispatcher.model].oldest_waits_s().items():
                oldest.add_metric([dispatcher.model, tier.value], wait_s)
        yield oldest
        yield self._by_tier(
            GaugeMetricFamily(
                "millrace_scheduler_held_jobs",
                "Jobs that this scheduler has pulled and not sent so far",
                labels=["model", "tier"],
            ),
            lambda dispatcher, tier: dispatcher.queue.num_here(tier),
        )
        running = Counter(
            scheduled.job.model
            for scheduled in self._scheduler.context.job_table
            if scheduled.phase is Phase.RUNNING
        )
        yield self._by_model(
            GaugeMetricFamily(
                "millrace_scheduler_running_jobs",
                "Jobs that workers run for this scheduler",
                labels=["model"],
            ),
            lambda dispatcher: running[dispatcher.model],
        )
        yield self._by_tier(
            GaugeMetricFamily(
                "millrace_scheduler_fairness_gap_tokens",
                "How many more tokens the tenant served most has been served than the one served "
                "least, of those of a tier who want to be",
                labels=["model", "tier"],
            ),
            lambda dispatcher, tier: dispatcher.queue.counters(tier).spread(),
        )

    def _workers(self) -> Iterator[Metric]:
        fleet = self._scheduler.context.fleet
        yield self._by_model(
            GaugeMetricFamily(
                "millrace_scheduler_workers", "Workers that this scheduler hears", labels=["model"]
            ),
            lambda dispatcher: fleet.num_workers(dispatcher.model),
        )
        yield self._by_model(
            GaugeMetricFamily(
                "millrace_scheduler_draining_workers",
                "Workers of those that take nothing new",
                labels=["model"],
            ),
            lambda dispatcher: (
                fleet.num_workers(dispatcher.model) - fleet.num_accepting(dispatcher.model)
            ),
        )
        yield self._by_model(
            GaugeMetricFamily(
                "millrace_scheduler_kv_cache_usage_perc",
                "How much of the KV blocks of a model's workers is used, 1 being all",
                labels=["model"],
            ),
            lambda dispatcher: fleet.kv_share(dispatcher.model),
        )
        departed = CounterMetricFamily(
            "millrace_scheduler_departed_workers",
            "Lives of workers that ended: silent, restarted or retired",
            labels=["why"],
        )
        for why, count in self._scheduler.departures.items():
            departed.add_metric([why.value], count)
        yield departed

    def _outcomes(self) -> Iterator[Metric]:
        dispatches = CounterMetricFamily(
            "millrace_scheduler_dispatches",
            "Dispatches by what became of them: accepted, refused by the worker, lost, …",
            labels=["model", "result"],
        )
        reruns = CounterMetricFamily(
            "millrace_scheduler_reruns",
            "Runs that left their worker for another: moved, lost or returned",
            labels=["model", "why"],
        )
        for dispatcher in self._dispatchers():
            for result, count in dispatcher.runner.counts.dispatches.items():
                dispatches.add_metric([dispatcher.model, result], count)
            for why, count in dispatcher.runner.counts.reruns.items():
                reruns.add_metric([dispatcher.model, why.value], count)
        yield dispatches
        yield reruns
        ended = CounterMetricFamily(
            "millrace_scheduler_ended_jobs",
            "Jobs that were answered without a worker: shed, expired, cancelled, failed, and why",
            labels=["model", "status", "code"],
        )
        known = self._scheduler.dispatchers
        by_labels: Counter[tuple[str, str, str]] = Counter()
        for (model, status, code), count in self._scheduler.context.finalizer.num_ended.items():
            by_labels[model if model in known else "other", status.value, code] += count
        for labels, count in by_labels.items():
            ended.add_metric(labels, count)
        yield ended

    def _times(self) -> Iterator[Metric]:
        queue = HistogramMetricFamily(
            "millrace_scheduler_queue_time_seconds",
            "From a request's receipt until a worker took it the first time",
            labels=["model", "tier"],
        )
        dispatch = HistogramMetricFamily(
            "millrace_scheduler_dispatch_duration_seconds",
            "From a job's turn until its worker answered the dispatch",
            labels=["model"],
        )
        for dispatcher in self._dispatchers():
            for tier, tally in dispatcher.runner.counts.queue_s.items():
                tally.add_to(queue, [dispatcher.model, tier.value])
            dispatcher.runner.counts.dispatch_s.add_to(dispatch, [dispatcher.model])
        yield queue
        yield dispatch

    def _dispatchers(self) -> Sequence[Dispatcher]:
        return list(self._scheduler.dispatchers.values())

    def _by_model(self, family: _Family, value: Callable[[Dispatcher], float]) -> _Family:
        for dispatcher in self._dispatchers():
            family.add_metric([dispatcher.model], value(dispatcher))
        return family

    def _by_tier(self, family: _Family, value: Callable[[Dispatcher, Tier], float]) -> _Family:
        for dispatcher in self._dispatchers():
            for tier in Tier:
                family.add_metric([dispatcher.model, tier.value], value(dispatcher, tier))
        return family

"""Prometheus metrics of a scheduler, read from its state at each scrape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from millrace.scheduler.fleet.fleet import Departure
from millrace.scheduler.jobs.scheduled_job import JobPhase
from millrace.scheduler.jobs.terminal_status import FORESEEN_ENDS
from millrace.scheduler.scheduler import Scheduler
from millrace.scheduler.state import DispatchResult, ModelQueue, MovedBy, Rerun
from millrace.schemas.engines import WorkerRole
from millrace.schemas.jobs import Tier
from millrace.schemas.models.rollouts import RolloutState

# Label of names outside the catalogue, of which clients can make up any number.
_OTHER_MODELS = "other"
_Samples = Iterable[tuple[Sequence[str], float]]


class SchedulerMetrics(Collector):
    """Prometheus collector.

    Labels are catalogue models, tiers and fixed words: no tenant, no request.

    Counters of a known model exist from the first scrape, at 0. Prometheus sees no increase in a
    series that begins at 1.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def collect(self) -> Iterator[Metric]:
        yield from self._queues()
        yield from self._workers()
        yield from self._outcomes()
        yield from self._rollouts()
        yield _counter(
            "millrace_scheduler_role_switches",
            "Workers that this scheduler gave another role: prefill or decode",
            ["model", "result"],
            (
                ((one.model, role.value), self._scheduler.roles.num_changes[one.model, role.value])
                for one in self._queues_of_models()
                for role in WorkerRole
            ),
        )
        yield from self._times()

    def _queues(self) -> Iterator[Metric]:
        estimates = self._scheduler.queue_estimates
        yield _gauge(
            "millrace_scheduler_queued_jobs",
            "Waiting jobs of a model, in schedulers and on the bus, at the last count",
            ["model"],
            self._by_model(lambda one: estimates[one.model].num_queued),
        )
        yield _gauge(
            "millrace_scheduler_oldest_wait_seconds",
            "Wait of the oldest job that this scheduler holds",
            ["model", "tier"],
            (
                ((one.model, tier.value), wait_s)
                for one in self._queues_of_models()
                for tier, wait_s in estimates[one.model].oldest_waits_s().items()
            ),
        )
        yield _gauge(
            "millrace_scheduler_held_jobs",
            "Jobs that this scheduler has pulled and not sent",
            ["model", "tier"],
            self._by_tier(lambda one, tier: one.queue.num_here(tier)),
        )
        yield _gauge(
            "millrace_scheduler_limited_jobs",
            "Waiting published jobs that their tenants' limits hold back",
            ["model"],
            self._by_model(lambda one: estimates[one.model].num_blocked),
        )
        running = Counter(
            scheduled.job.model
            for scheduled in self._scheduler.state.job_table
            if scheduled.phase is JobPhase.RUNNING
        )
        yield _gauge(
            "millrace_scheduler_running_jobs",
            "Jobs that workers run for this scheduler",
            ["model"],
            self._by_model(lambda one: running[one.model]),
        )
        yield _gauge(
            "millrace_scheduler_fairness_gap_tokens",
            "Most minus least tokens served to the active tenants of a tier",
            ["model", "tier"],
            self._by_tier(lambda one, tier: one.queue.counters(tier).spread()),
        )

    def _workers(self) -> Iterator[Metric]:
        fleet = self._scheduler.state.fleet
        yield _gauge(
            "millrace_scheduler_workers",
            "Live workers, by their heartbeats at this scheduler",
            ["model"],
            self._by_model(lambda one: fleet.num_workers(one.model)),
        )
        yield _gauge(
            "millrace_scheduler_draining_workers",
            "Workers that drain and take no new requests",
            ["model"],
            self._by_model(
                lambda one: fleet.num_workers(one.model) - fleet.num_accepting(one.model)
            ),
        )
        yield _gauge(
            "millrace_scheduler_kv_cache_usage_perc",
            "Used share of the KV blocks of a model's workers, 0 to 1",
            ["model"],
            self._by_model(lambda one: fleet.kv_share(one.model)),
        )
        yield _counter(
            "millrace_scheduler_departed_workers",
            "Incarnations of workers that ended: silent, restarted or retired",
            ["why"],
            (((why.value,), self._scheduler.state.departures[why]) for why in Departure),
        )

    def _outcomes(self) -> Iterator[Metric]:
        counts = [(one.model, one.counts) for one in self._queues_of_models()]
        yield _counter(
            "millrace_scheduler_dispatches",
            "Dispatches by result: accepted, refused by the worker, lost, …",
            ["model", "result"],
            (
                ((model, result.value), of.dispatches[result])
                for model, of in counts
                for result in DispatchResult
            ),
        )
        yield _counter(
            "millrace_scheduler_reruns",
            "Attempts that left their worker for another: moved, lost or returned",
            ["model", "why"],
            (((model, why.value), of.reruns[why]) for model, of in counts for why in Rerun),
        )
        yield _counter(
            "millrace_scheduler_moves",
            "Moved streams, by how the next worker gets their context: pulled or computed",
            ["model", "source"],
            (((model, how.value), of.moves[how]) for model, of in counts for how in MovedBy),
        )
        known = self._scheduler.model_queues
        ended = Counter(
            {
                (model, status.value, code): 0
                for model in (*known, _OTHER_MODELS)
                for status, code in FORESEEN_ENDS
            }
        )
        for (model, status, code), count in self._scheduler.state.num_ended.items():
            ended[model if model in known else _OTHER_MODELS, status.value, code] += count
        yield _counter(
            "millrace_scheduler_ended_jobs",
            "Jobs ended without a worker, by status and code: shed, expired, cancelled, failed",
            ["model", "status", "code"],
            ended.items(),
        )

    def _rollouts(self) -> Iterator[Metric]:
        rollouts = self._scheduler.rollouts
        yield _gauge(
            "millrace_scheduler_rollout_percent",
            "Percentage of a model's requests that its rollout sends to the candidate",
            ["model"],
            (((one.model,), one.percent) for one in rollouts.open()),
        )
        yield _counter(
            "millrace_scheduler_rollouts",
            "Rollouts that this scheduler ended: completed or aborted",
            ["model", "result"],
            (
                ((model, state.value), rollouts.num_ended[model, state])
                for model in dict.fromkeys(
                    (*self._scheduler.model_queues, *(model for model, _ in rollouts.num_ended))
                )
                for state in (RolloutState.COMPLETED, RolloutState.ABORTED)
            ),
        )

    def _times(self) -> Iterator[Metric]:
        dispatch_wait = HistogramMetricFamily(
            "millrace_scheduler_queue_time_seconds",
            "Dispatch wait: time from a request's receipt until a worker first accepted it",
            labels=["model", "tier"],
        )
        dispatch = HistogramMetricFamily(
            "millrace_scheduler_dispatch_duration_seconds",
            "Time from a job's turn until its worker answered the dispatch",
            labels=["model"],
        )
        for model_queue in self._queues_of_models():
            for tier, tally in model_queue.counts.dispatch_wait_s.items():
                tally.add_to(dispatch_wait, [model_queue.model, tier.value])
            model_queue.counts.dispatch_s.add_to(dispatch, [model_queue.model])
        yield dispatch_wait
        yield dispatch

    def _queues_of_models(self) -> Sequence[ModelQueue]:
        return list(self._scheduler.model_queues.values())

    def _by_model(self, value: Callable[[ModelQueue], float]) -> _Samples:
        return (((one.model,), value(one)) for one in self._queues_of_models())

    def _by_tier(self, value: Callable[[ModelQueue, Tier], float]) -> _Samples:
        return (
            ((one.model, tier.value), value(one, tier))
            for one in self._queues_of_models()
            for tier in Tier
        )


def _gauge(name: str, meaning: str, labels: Sequence[str], samples: _Samples) -> Metric:
    return _filled(GaugeMetricFamily(name, meaning, labels=labels), samples)


def _counter(name: str, meaning: str, labels: Sequence[str], samples: _Samples) -> Metric:
    return _filled(CounterMetricFamily(name, meaning, labels=labels), samples)


def _filled(family: GaugeMetricFamily | CounterMetricFamily, samples: _Samples) -> Metric:
    for labels, value in samples:
        family.add_metric(labels, value)
    return family

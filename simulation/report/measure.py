"""Measurements of a run for its report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from millrace.bench.settings import Slo
from millrace.schemas.engines import WorkerRole
from millrace.schemas.jobs import Tier
from millrace.schemas.records import Status
from millrace.simulation.outcomes import InterTokenLatencies
from millrace.simulation.report.columns import UNFINISHED, Columns, Flags, Floats, columns_of
from millrace.simulation.report.fairness import fairness_of
from millrace.simulation.report.report import (
    SCHEMA,
    Cost,
    Group,
    Percentiles,
    PolicyReport,
    Setup,
    SimulatedBin,
    SimulationReport,
)
from millrace.simulation.settings import SimulationSettings
from millrace.simulation.traces.trace import TraceRequest
from millrace.simulation.workers.fleet import WorkerIncarnation
from millrace.simulation.world import Result

_MAX_BINS = 120
# Beyond this number of tenants, those with the most tokens are reported.
_MAX_TENANTS = 200
_S_PER_HOUR = 3_600.0


def report_of(
    trace: Sequence[TraceRequest], settings: SimulationSettings, policies: Sequence[PolicyReport]
) -> SimulationReport:
    models = sorted({request.model for request in trace})
    setup = Setup(
        num_requests=len(trace),
        last_arrival_s=trace[-1].at_s,
        prompt_tokens=sum(request.prompt_tokens for request in trace),
        output_tokens=sum(request.output_tokens for request in trace),
        num_tenants=len({request.tenant for request in trace}),
        num_workers={model: settings.workers_of(model) for model in models},
        roles=dict(Counter(settings.roles)),
        link=settings.link if settings.moves_blocks else None,
        seed=settings.seed,
        failures=settings.failures,
        mtbf_s=settings.mtbf_s,
        restart_s=settings.restart_s,
        gpus_per_worker=settings.num_gpus_paid,
        slo=settings.slo,
        scheduler=settings.config.scheduler,
        worker=settings.config.worker,
    )
    return SimulationReport(schema=SCHEMA, setup=setup, policies=tuple(policies))


def policy_report(name: str, result: Result, settings: SimulationSettings) -> PolicyReport:
    """Return the report of one policy."""
    columns = columns_of(result.outcomes)
    everyone = np.ones(len(columns.sent_s), dtype=np.bool_)
    overall = _group(columns, everyone, settings.slo, quantiles=True)
    tiers = [tier for tier in Tier if columns.of_tier(tier).any()]
    span_s = max(result.end_s, 1e-9)
    memory_tokens = _memory_tokens(result.incarnations, span_s)
    weight = settings.config.scheduler.output_weight
    fairness = {
        tier.value: fair
        for tier in tiers
        if (fair := fairness_of(columns, tier, span_s, weight, memory_tokens)) is not None
    }
    up_s = sum(_up_s(worker) for worker in result.incarnations)
    batches = [worker.batch for worker in result.incarnations if worker.batch is not None]
    return PolicyReport(
        policy=name,
        end_s=result.end_s,
        overall=overall,
        by_tier={
            tier.value: _group(columns, columns.of_tier(tier), settings.slo) for tier in tiers
        },
        by_tenant={
            tenant: _group(columns, columns.of_tenant(tenant), settings.slo)
            for tenant in _largest_tenants(columns)
        },
        fairness=fairness,
        itl_ms=_itl(result.inter_token),
        requests_per_s=overall.num_done / span_s,
        goodput_requests_per_s=None
        if overall.goodput is None
        else overall.goodput * overall.num_requests / span_s,
        output_tokens_per_s=overall.output_tokens / span_s,
        prefix_hit_rate=overall.cached_tokens / max(overall.prompt_tokens, 1),
        utilisation=_utilisation(result.incarnations),
        utilisation_by_role=_utilisation_by_role(result.incarnations),
        mean_workers=up_s / span_s,
        num_deaths=result.num_deaths,
        num_runs_moved=sum(max(0, outcome.num_runs - 1) for outcome in result.outcomes),
        streams_moved=result.streams_moved,
        num_pulled_tokens=result.num_pulled_tokens,
        num_role_changes=result.num_role_changes,
        num_preemptions=sum(batch.num_preemptions for batch in batches),
        cost=_cost(result.incarnations, overall, settings),
        timeline=_timeline(columns, result.incarnations, span_s),
    )


# --- requests ---


def _group(columns: Columns, rows: Flags, slo: Slo | None, *, quantiles: bool = False) -> Group:
    done, ran = rows & columns.is_done, rows & columns.has_run
    statuses, counts = np.unique(columns.status[rows], return_counts=True)
    by_status = dict(zip(statuses.tolist(), counts.tolist(), strict=True))
    num_requests = int(rows.sum())
    goodput = None
    if slo is not None:
        goodput = float((_keeps(columns, slo) & done).sum()) / max(num_requests, 1)
    return Group(
        num_requests=num_requests,
        **{f"num_{status}": by_status.get(status.value, 0) for status in Status},
        num_unfinished=by_status.get(UNFINISHED, 0),
        prompt_tokens=int(columns.prompt_tokens[ran].sum()),
        cached_tokens=int(columns.cached_tokens[ran].sum()),
        output_tokens=int(columns.output_tokens[rows].sum()),
        ttft_ms=percentiles_of(columns.ttft_ms[done], quantiles=quantiles),
        tpot_ms=percentiles_of(columns.tpot_ms[done], quantiles=quantiles),
        e2e_ms=percentiles_of(columns.e2e_ms[done], quantiles=quantiles),
        goodput=goodput,
    )


def percentiles_of(values: Floats, *, quantiles: bool = False) -> Percentiles | None:
    """Return the percentiles of the values that are not NaN; None without any."""
    ordered = np.sort(values[~np.isnan(values)])
    if not len(ordered):
        return None

    def at(share: float) -> float:
        return float(ordered[min(int(share * len(ordered)), len(ordered) - 1)])

    return Percentiles(
        count=len(ordered),
        mean=float(ordered.mean()),
        p50=at(0.5),
        p90=at(0.9),
        p99=at(0.99),
        max=float(ordered[-1]),
        quantiles_ms=tuple(round(at(share / 100), 4) for share in range(101)) if quantiles else (),
    )


def _itl(latencies: InterTokenLatencies) -> Percentiles | None:
    if not latencies.count:
        return None
    return Percentiles(
        count=latencies.count,
        mean=latencies.mean_s * 1e3,
        p50=latencies.at(0.5) * 1e3,
        p90=latencies.at(0.9) * 1e3,
        p99=latencies.at(0.99) * 1e3,
        max=latencies.max_s * 1e3,
    )


def _keeps(columns: Columns, slo: Slo) -> Flags:
    keeps = np.ones(len(columns.sent_s), dtype=np.bool_)
    for bound_ms, values in (
        (slo.ttft_ms, columns.ttft_ms),
        (slo.tpot_ms, np.nan_to_num(columns.tpot_ms)),
        (slo.e2e_ms, columns.e2e_ms),
    ):
        if bound_ms is not None:
            keeps &= values <= bound_ms
    return keeps


def _largest_tenants(columns: Columns) -> list[str]:
    tokens = columns.prompt_tokens + columns.output_tokens
    names, places = np.unique(columns.tenant, return_inverse=True)
    order = np.argsort(-np.bincount(places, weights=tokens), kind="stable")[:_MAX_TENANTS]
    return sorted(names[order].tolist())


# --- workers ---


def _up_s(worker: WorkerIncarnation) -> float:
    """Return for how long a worker could work, in seconds."""
    if worker.up_s is None or worker.gone_s is None:
        return 0.0
    return max(0.0, worker.gone_s - max(worker.up_s, 0.0))


def _utilisation(workers: Sequence[WorkerIncarnation]) -> float:
    up_s = sum(_up_s(worker) for worker in workers)
    busy_s = sum(worker.batch.busy_s for worker in workers if worker.batch is not None)
    return min(busy_s / up_s, 1.0) if up_s else 0.0


def _utilisation_by_role(workers: Sequence[WorkerIncarnation]) -> dict[WorkerRole, float]:
    by_role: dict[WorkerRole, list[WorkerIncarnation]] = {}
    for worker in workers:
        by_role.setdefault(worker.role, []).append(worker)
    return {role: _utilisation(those) for role, those in by_role.items()}


def _memory_tokens(workers: Sequence[WorkerIncarnation], span_s: float) -> float:
    """Return the mean capacity of the workers' caches together, in tokens."""
    return sum(
        worker.batch.capacity_tokens * _up_s(worker) / span_s
        for worker in workers
        if worker.batch is not None
    )


def _cost(
    workers: Sequence[WorkerIncarnation], overall: Group, settings: SimulationSettings
) -> Cost:
    paid_s = sum(max(0.0, (worker.gone_s or 0.0) - max(worker.paid_s, 0.0)) for worker in workers)
    gpu_hours = paid_s * settings.num_gpus_paid / _S_PER_HOUR
    total = gpu_hours * settings.gpu_hour_price
    output = overall.output_tokens
    tokens = output + overall.prompt_tokens
    return Cost(
        currency=settings.currency,
        gpu_hours=gpu_hours,
        gpu_hour_price=settings.gpu_hour_price,
        total=total,
        per_1m_output_tokens=total / output * 1e6 if output else None,
        per_1m_tokens=total / tokens * 1e6 if tokens else None,
    )


# --- time ---


def _timeline(
    columns: Columns, incarnations: Sequence[WorkerIncarnation], span_s: float
) -> tuple[SimulatedBin, ...]:
    width_s = max(span_s / _MAX_BINS, 0.1)
    edges_s = np.arange(0.0, span_s + width_s * 0.999, width_s)
    middles_s = (edges_s[:-1] + edges_s[1:]) / 2
    everyone = np.ones(len(columns.sent_s), dtype=np.bool_)
    made = np.diff(columns.made_by(edges_s, everyone)) / width_s
    waiting = columns.num_waiting_at(middles_s, everyone)
    running = columns.num_running_at(middles_s, everyone)
    arrivals, _ = np.histogram(columns.sent_s, edges_s)
    ends, _ = np.histogram(columns.end_s[columns.is_done], edges_s)
    num_up = [
        sum(one.up_s is not None and one.up_s <= at_s < (one.gone_s or 0) for one in incarnations)
        for at_s in middles_s
    ]
    first = columns.is_done & ~np.isnan(columns.first_s)
    places = np.searchsorted(edges_s, columns.first_s[first], side="right") - 1
    ttft_ms = columns.ttft_ms[first]
    bins = []
    for place, at_s in enumerate(edges_s[:-1]):
        within = ttft_ms[places == place]
        bins.append(
            SimulatedBin(
                at_s=round(float(at_s), 3),
                width_s=round(width_s, 3),
                arrivals_per_s=float(arrivals[place]) / width_s,
                ends_per_s=float(ends[place]) / width_s,
                output_tokens_per_s=float(made[place]),
                num_waiting=float(waiting[place]),
                num_running=float(running[place]),
                num_workers=float(num_up[place]),
                ttft_p50_ms=float(np.median(within)) if len(within) else None,
            )
        )
    return tuple(bins)

"""Table of a simulation's report for the terminal, policies side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter

from millrace.runtime.text_table import text_table
from millrace.schemas.engines import WorkerRole
from millrace.simulation.report.report import (
    Group,
    Percentiles,
    PolicyReport,
    Setup,
    SimulationReport,
)

_SHARES = ("p50", "p90", "p99")
_LATENCIES = (("ttft_ms", "TTFT"), ("tpot_ms", "TPOT"), ("e2e_ms", "E2E"))
# Larger numbers of tenants are only in the JSON report.
_MAX_TENANTS = 12

Row = tuple[str, Callable[[PolicyReport], str]]
_COSTS: tuple[Row, ...] = (
    ("GPU-hours", lambda one: f"{one.cost.gpu_hours:,.2f}"),
    ("cost in all", lambda one: f"{one.cost.total:,.2f} {one.cost.currency}"),
    ("cost per 1M output tokens", lambda one: _money(one.cost.per_1m_output_tokens, one)),
    ("cost per 1M tokens, in and out", lambda one: _money(one.cost.per_1m_tokens, one)),
)


def render(report: SimulationReport) -> str:
    """Return the whole report, ending with a line break."""
    policies = report.policies
    rows = [*_totals(report), *_overall(policies), *_fairness(policies), *_COSTS]
    tiers = list(dict.fromkeys(tier for one in policies for tier in one.by_tier))
    if len(tiers) > 1:
        rows += _groups("by tier", policies, tiers, lambda one: one.by_tier)
    tenants = list(dict.fromkeys(tenant for one in policies for tenant in one.by_tenant))
    if 1 < len(tenants) <= _MAX_TENANTS:
        rows += _groups("by tenant", policies, tenants, lambda one: one.by_tenant)
    figures = text_table(
        ("", *(one.policy for one in policies)),
        [(label, *(value(one) for one in policies)) for label, value in rows],
        (False, *(True for _ in policies)),
    )
    return "\n".join([*_setup_lines(report.setup), "", figures])


def _setup_lines(setup: Setup) -> list[str]:
    simulation, engine = setup.worker.engine.simulation, setup.worker.engine
    workers = ", ".join(f"{count} of {model}" for model, count in setup.num_workers.items())
    if setup.roles:
        workers += f" ({', '.join(f'{count} {role}' for role, count in setup.roles.items())})"
    autoscale = setup.scheduler.autoscale
    if autoscale.is_on:
        workers += f" at first, then {autoscale.min_workers} to {autoscale.max_workers} of each"
    trace = (
        f"{setup.num_requests:,} requests of {setup.num_tenants:,} tenants in "
        f"{setup.last_arrival_s:,.0f} s; {setup.prompt_tokens:,} tokens in, "
        f"{setup.output_tokens:,} out"
    )
    workers += (
        f"; each {engine.max_num_sequences} sequences, "
        f"{engine.num_blocks * engine.block_size_tokens:,} tokens of KV cache"
    )
    speed = (
        f"{simulation.prefill_tokens_per_s:,.0f} prompt tokens/s; a decode step takes "
        f"{simulation.step_ms:g} ms + {simulation.step_ms_per_sequence:g} ms a sequence + "
        f"{simulation.step_ms_per_kv_token:g} ms a KV token"
    )
    lines = [f"{'trace':<10}{trace}", f"{'workers':<10}{workers}", f"{'speed':<10}{speed}"]
    if engine.tensor_parallel > 1:
        lines.append(
            f"{'group':<10}{engine.tensor_parallel} devices share that; a step takes "
            f"{simulation.collective_ms:.3g} ms + {simulation.collective_ms_per_token:.3g} ms a "
            f"token + {simulation.collective_ms_per_sequence:.3g} ms a sequence besides"
        )
    if setup.link is not None:
        lines.append(
            f"{'link':<10}{setup.link.bytes_per_token:,.0f} bytes a token of KV cache, "
            f"{setup.link.bytes_per_s / 1e9:g} GB/s, {setup.link.overhead_s * 1e3:g} ms each pull"
        )
    return lines


def _totals(report: SimulationReport) -> list[Row]:
    rows: list[Row] = [
        ("ended after, s", lambda one: f"{one.end_s:,.1f}"),
        ("answered", lambda one: f"{one.overall.num_done:,}"),
    ]
    rows += [
        (name, _count(f"overall.num_{name}"))
        for name in ("shed", "expired", "cancelled", "failed", "unfinished")
        if any(getattr(one.overall, f"num_{name}") for one in report.policies)
    ]
    rows += [
        ("requests/s", lambda one: f"{one.requests_per_s:,.2f}"),
        ("output tokens/s", lambda one: f"{one.output_tokens_per_s:,.0f}"),
        ("prefix hit rate", lambda one: f"{one.prefix_hit_rate:.1%}"),
        ("utilisation", lambda one: f"{one.utilisation:.1%}"),
        ("workers, mean", lambda one: f"{one.mean_workers:,.1f}"),
    ]
    roles = list(dict.fromkeys(role for one in report.policies for role in one.utilisation_by_role))
    if len(roles) > 1:
        rows += [(f"utilisation, {role}", _utilisation(role)) for role in roles]
    if report.setup.link is not None:
        rows.append(("streams moved", lambda one: f"{sum(one.streams_moved.values()):,}"))
        rows.append(("tokens pulled", _count("num_pulled_tokens")))
    rows += [
        (title, _count(name))
        for name, title in (
            ("num_role_changes", "roles switched"),
            ("num_deaths", "workers that died"),
            ("num_runs_moved", "runs beyond the first"),
            ("num_preemptions", "preemptions"),
        )
        if any(getattr(one, name) for one in report.policies)
    ]
    return rows


def _utilisation(role: WorkerRole) -> Callable[[PolicyReport], str]:
    return lambda one: _share(one.utilisation_by_role.get(role))


def _count(name: str) -> Callable[[PolicyReport], str]:
    """Return a function that formats a count; ``name`` may have dots."""
    count = attrgetter(name)
    return lambda one: f"{count(one):,}"


def _overall(policies: Sequence[PolicyReport]) -> list[Row]:
    rows: list[Row] = [
        (f"{title} {share}, ms", _latency(field, share))
        for field, title in _LATENCIES
        for share in _SHARES
    ]
    rows += [(f"ITL {share}, ms", _itl(share)) for share in _SHARES]
    if any(one.overall.goodput is not None for one in policies):
        rows.append(("goodput within the SLO", lambda one: _share(one.overall.goodput)))
        rows.append(("goodput, requests/s", lambda one: _rate(one.goodput_requests_per_s)))
    return rows


def _latency(field: str, share: str) -> Callable[[PolicyReport], str]:
    return lambda one: shown_at(getattr(one.overall, field), share)


def _itl(share: str) -> Callable[[PolicyReport], str]:
    return lambda one: shown_at(one.itl_ms, share)


def _fairness(policies: Sequence[PolicyReport]) -> list[Row]:
    tiers = list(dict.fromkeys(tier for one in policies for tier in one.fairness))
    rows: list[Row] = []
    for tier in tiers:
        rows += [
            (f"Jain's index, {tier}", _fair(tier, "jain", ".4f")),
            (f"largest gap, {tier}, tokens", _fair(tier, "max_gap_tokens", ",.0f")),
        ]
    return rows


def _fair(tier: str, field: str, form: str) -> Callable[[PolicyReport], str]:
    def value(one: PolicyReport) -> str:
        of = one.fairness.get(tier)
        return "-" if of is None else format(getattr(of, field), form)

    return value


def _groups(
    title: str,
    policies: Sequence[PolicyReport],
    names: Sequence[str],
    groups: Callable[[PolicyReport], dict[str, Group]],
) -> list[Row]:
    def cell(name: str, value: Callable[[Group], str]) -> Callable[[PolicyReport], str]:
        def of(one: PolicyReport) -> str:
            group = groups(one).get(name)
            return "-" if group is None else value(group)

        return of

    rows: list[Row] = [("", lambda _: ""), (title, lambda _: "")]
    for name in names:
        shown = name if len(name) <= 14 else f"{name[:13]}…"
        rows += [
            (f"{shown}, answered", cell(name, lambda group: f"{group.num_done:,}")),
            (f"{shown}, TTFT p50, ms", cell(name, lambda group: shown_at(group.ttft_ms, "p50"))),
            (f"{shown}, TTFT p99, ms", cell(name, lambda group: shown_at(group.ttft_ms, "p99"))),
        ]
        if any(one.overall.goodput is not None for one in policies):
            rows.append((f"{shown}, goodput", cell(name, lambda group: _share(group.goodput))))
    return rows


def shown_at(of: Percentiles | None, share: str) -> str:
    return "-" if of is None else f"{getattr(of, share):,.1f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:,.2f}"


def _money(value: float | None, one: PolicyReport) -> str:
    return "-" if value is None else f"{value:,.4f} {one.cost.currency}"

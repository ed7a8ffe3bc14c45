"""Report of a simulation: the JSON of ``--json``, and the data of the table and the page.

``schema`` names this layout and its version. Times ``_s`` are virtual, from the trace's 0.
"""

from __future__ import annotations

import msgspec

from millrace.bench.settings import Slo
from millrace.schemas.config import SchedulerConfig, WorkerConfig
from millrace.schemas.engines import WorkerRole
from millrace.simulation.settings import Failure, KvLink

SCHEMA = "millrace.simulate/1"


class Percentiles(msgspec.Struct, frozen=True, kw_only=True):
    """Percentiles of ``count`` measurements in milliseconds.

    ``quantiles_ms`` are 101 values from the smallest to the largest, only for all requests
    together.
    """

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float
    quantiles_ms: tuple[float, ...] = ()


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """Requests of all tenants, of a tier or of a tenant, by how they ended.

    Requests that were not sent, as their session's previous turn was never answered, are left out.
    Latencies are of answered requests, from when they were sent; None without any. Of
    ``prompt_tokens`` to prefill, ``cached_tokens`` were cached. ``goodput`` is the share of all
    requests that were answered within the SLO; None without one.
    """

    num_requests: int
    num_done: int
    num_shed: int
    num_expired: int
    num_cancelled: int
    num_failed: int
    num_unfinished: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    ttft_ms: Percentiles | None
    tpot_ms: Percentiles | None
    e2e_ms: Percentiles | None
    goodput: float | None


class Fairness(msgspec.Struct, frozen=True, kw_only=True):
    """Fairness among a tier's tenants while at least two had waiting jobs.

    ``num_tenants`` were compared, over ``contested_s`` in all. Service is tokens: prompt tokens
    that were not cached, and ``output_weight`` times the answer's.

    ``jain`` is Jain's index of each tenant's service against the mean service while it waited: 1 is
    equal, 1 / ``num_tenants`` is all for one. ``max_gap_tokens`` is the largest difference of
    service of two tenants over any time in which both were waiting. ``bound_tokens`` is the bound
    of a virtual token counter for it: twice the most that is in the workers' memory.
    """

    num_tenants: int
    contested_s: float
    jain: float
    max_gap_tokens: float
    bound_tokens: float


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """Cost of the workers in ``currency``, from their start until they are gone.

    None: no tokens.
    """

    currency: str
    gpu_hours: float
    gpu_hour_price: float
    total: float
    per_1m_output_tokens: float | None
    per_1m_tokens: float | None


class SimulatedBin(msgspec.Struct, frozen=True, kw_only=True):
    """Time bin of the run from ``at_s`` on. Numbers of requests and workers are means."""

    at_s: float
    width_s: float
    arrivals_per_s: float
    ends_per_s: float
    output_tokens_per_s: float
    num_waiting: float
    num_running: float
    num_workers: float
    ttft_p50_ms: float | None


class PolicyReport(msgspec.Struct, frozen=True, kw_only=True):
    """Report of one policy.

    ``utilisation`` is the share of the workers' time in which they computed, of all and by their
    first role. ``num_runs_moved`` counts runs beyond the first of a request.

    ``itl_ms`` are the gaps between consecutive tokens of all streams, to half a percent.
    ``requests_per_s`` counts answered requests, ``goodput_requests_per_s`` those within the SLO
    (None without one). ``streams_moved`` moved while their worker lived, with blocks that were
    ``pulled`` or ``computed`` again. ``num_pulled_tokens`` came to workers from the KV caches of
    others. The scheduler made ``num_role_changes``.
    """

    policy: str
    end_s: float
    overall: Group
    by_tier: dict[str, Group]
    by_tenant: dict[str, Group]
    fairness: dict[str, Fairness]
    itl_ms: Percentiles | None
    requests_per_s: float
    goodput_requests_per_s: float | None
    output_tokens_per_s: float
    prefix_hit_rate: float
    utilisation: float
    utilisation_by_role: dict[WorkerRole, float]
    mean_workers: float
    num_deaths: int
    num_runs_moved: int
    streams_moved: dict[str, int]
    num_pulled_tokens: int
    num_role_changes: int
    num_preemptions: int
    cost: Cost
    timeline: tuple[SimulatedBin, ...]


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """Setup of the simulation, the same for each policy.

    ``roles`` are the numbers of each model's workers by role (empty: all have ``worker.role``).
    ``link`` is the link for pulled blocks (None: none are pulled).
    """

    num_requests: int
    last_arrival_s: float
    prompt_tokens: int
    output_tokens: int
    num_tenants: int
    num_workers: dict[str, int]
    roles: dict[WorkerRole, int]
    link: KvLink | None
    seed: int
    failures: tuple[Failure, ...]
    mtbf_s: float
    restart_s: float
    gpus_per_worker: float
    slo: Slo | None
    scheduler: SchedulerConfig
    worker: WorkerConfig


class SimulationReport(msgspec.Struct, frozen=True, kw_only=True):
    schema: str
    setup: Setup
    policies: tuple[PolicyReport, ...]

"""The report of a simulation: what ``--json`` writes, and what the table and the page show.

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
    """Of ``count`` measurements in milliseconds. ``quantiles_ms`` are 101, from the smallest to the
    largest; left out but for all requests together."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float
    quantiles_ms: tuple[float, ...] = ()


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """Requests of everybody, of a tier or of a tenant, by how they ended; those that were not sent,
    as the turn of their session before them was never answered, are left out. Latencies are of
    those that were answered, from when they were sent; None if there are none. Of ``prompt_tokens``
    that were to be prefilled, ``cached_tokens`` were found. ``goodput`` is the share of all that
    was answered within the SLO; None without one."""

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
    """How service was shared among the tenants of a tier while ``num_tenants`` of them had jobs
    waiting at the same time, for ``contested_s`` in all. Service is tokens: prompt tokens that
    were not cached, and ``output_weight`` times the answer's.

    ``jain`` is Jain's index of what each got against what all got in the mean while it waited: 1 is
    equal, 1 / ``num_tenants`` is all for one. ``max_gap_tokens`` is the largest difference of
    service that two tenants got over any time in which both were waiting; ``bound_tokens`` is what
    a virtual token counter promises for it: twice what is in the workers' memory at most.
    """

    num_tenants: int
    contested_s: float
    jain: float
    max_gap_tokens: float
    bound_tokens: float


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """Workers cost money, in ``currency``, from when they are started until they are gone. None: no
    tokens."""

    currency: str
    gpu_hours: float
    gpu_hour_price: float
    total: float
    per_1m_output_tokens: float | None
    per_1m_tokens: float | None


class SimulatedBin(msgspec.Struct, frozen=True, kw_only=True):
    """A stretch of the run from ``at_s`` on; what is counted in things is the mean."""

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
    """What one policy came to. ``utilisation`` is the share of the workers' time in which they
    computed, of all and by the role that they began with; ``num_runs_moved`` counts runs beyond
    the first of a request.

    ``itl_ms`` are the gaps between one token and the next of all streams, to half a percent.
    ``goodput_requests_per_s`` are requests that kept the SLO, as ``requests_per_s`` are all that
    were answered; None without an SLO. ``streams_moved`` went on elsewhere while their worker
    lived, with blocks that were ``pulled`` or ``computed`` again; ``num_pulled_tokens`` came to
    workers from the KV caches of others; ``num_role_changes`` were made by the scheduler."""

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
    """What was simulated, for each policy alike. ``roles`` are how many of each model's workers
    were given which (empty: all have ``worker.role``), ``link`` what blocks are pulled over (None:
    none are)."""

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

"""How the scheduler orders, places and sheds jobs, and how many workers it asks for."""

from __future__ import annotations

from typing import Literal

from millrace.schemas.config.section import Section


class TierPolicy(Section, frozen=True, kw_only=True):
    """How a scheduler treats a tier. A job whose first token is predicted too late goes to a
    smaller model (``degrade``), else it is refused (``shed``), else it waits."""

    weight: float
    """Share of the workers against other tiers with waiting jobs. Batch work has none: it gets what
    the others leave."""

    ttft_bound_ms: float = 0.0
    """Predicted time to the first token that is too late; 0: none is."""

    degrade: bool = False
    """Give a late job to a smaller model, if its caller left the choice (``model: auto``)."""

    shed: bool = False
    """Refuse a late job."""

    @property
    def ttft_bound_s(self) -> float | None:
        """``ttft_bound_ms`` in seconds. None: no job is late."""
        return self.ttft_bound_ms / 1e3 if self.ttft_bound_ms > 0 else None


class TierPolicies(Section, frozen=True, kw_only=True):
    """One policy for each tier."""

    enterprise: TierPolicy = TierPolicy(weight=8.0, ttft_bound_ms=5_000.0)
    pro: TierPolicy = TierPolicy(weight=4.0, ttft_bound_ms=10_000.0, degrade=True)
    free: TierPolicy = TierPolicy(weight=1.0, ttft_bound_ms=60_000.0, degrade=True, shed=True)
    batch: TierPolicy = TierPolicy(weight=1.0)


class AutoscaleConfig(Section, frozen=True, kw_only=True):
    """How many workers a model should have: as many as its predicted wait and KV cache need, within
    two bounds."""

    min_workers: int = 1
    """Fewest workers of a model; 0: a model that nobody uses has none."""

    max_workers: int = 0
    """Most workers of a model; 0: no autoscaling."""

    warm: int = 0
    """Workers of a model beyond those that it needs, loaded and idle, for a burst that is not to
    wait for a start."""

    target_wait_s: float = 2.0
    """Predicted wait of a job above which there should be more workers."""

    target_kv_share: float = 0.85
    """Share of the KV cache in use, 0 to 1, above which there should be more workers."""

    cold_start_s: float = 10.0
    """What a worker takes from its start to its first job."""

    scale_down_after_s: float = 60.0
    """How long fewer workers must have been enough before their number goes down."""

    idle_s: float = 300.0
    """How long after its last job a model goes down to none, where ``min_workers`` is 0."""

    @property
    def is_on(self) -> bool:
        """Whether the number of workers is scaled."""
        return self.max_workers > 0


class SchedulerConfig(Section, frozen=True, kw_only=True):
    """The scheduler: intake, order, placement, and when a worker or an attempt counts as lost."""

    scheduler_id: str = ""
    """Name of this scheduler; empty: one is drawn at start."""

    models: tuple[str, ...] = ()
    """Models to schedule; empty: all of the catalogue."""

    max_queued_jobs: int = 2_000
    """Waiting jobs of a model above which the newest are shed, those of the tenants with the
    longest queues first. Jobs that services publish on the bus do not count."""

    window_jobs: int = 512
    """Jobs of a tier that a scheduler holds while all workers are busy; the others stay in the
    queue on the bus."""

    window_jobs_per_tenant: int = 8
    """Jobs of a tenant that it holds of these."""

    order: Literal["deadline", "shortest"] = "deadline"
    """Which job of a tenant comes first: the one with the earliest deadline (then the earliest
    arrival), or with the shortest predicted completion."""

    ageing_s: float = 10.0
    """Wait that is worth half the length in the order ``shortest``."""

    output_weight: float = 2.0
    """What an output token costs in the fair shares, in input tokens."""

    placement: Literal["affine", "least_loaded"] = "affine"
    """How a worker is chosen: its cached prefixes weighed against its load, or its load alone."""

    max_prefix_keys: int = 1_000_000
    """Cached blocks of all workers that the scheduler remembers."""

    heartbeat_timeout_s: float = 2.0
    """How long a worker may be silent before it counts as dead."""

    lease_extend_s: float = 2.0
    """How often the lease of a waiting job is extended."""

    dispatch_timeout_s: float = 1.0
    """How long a worker may take to accept a job."""

    resume_timeout_s: float = 0.5
    """How long a gateway may take to say what of an answer its client has."""

    max_attempts: int = 16
    """Lost attempts at which a job fails."""

    cancel_memory_s: float = 86_400.0
    """How long the cancel of a job that waits in the queue, or has not come yet, is remembered."""

    status_interval_s: float = 0.25
    """How often the scheduler announces its queues to the gateways, and looks for what to shed."""

    switch_roles: bool = False
    """Whether schedulers change the roles of a model's workers (``worker.role``) that are
    ``prefill`` or ``decode``, where one role is short of workers and the other is not. See
    docs/kv-cache.md."""

    tiers: TierPolicies = TierPolicies()
    """Policy of each tier."""

    autoscale: AutoscaleConfig = AutoscaleConfig()
    """How many workers a model should have."""

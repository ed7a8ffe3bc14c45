"""Settings of a simulation, and the scheduling policies that it compares."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from millrace.bench.settings import Slo
from millrace.bus.fleet.role_shares import RoleShares
from millrace.schemas.config import Config, SchedulerConfig, TierPolicies, TierPolicy
from millrace.schemas.engines import WorkerRole
from millrace.schemas.errors import ConfigError
from millrace.schemas.jobs import Tier
from millrace.schemas.tenants import DEFAULT_CURRENCY


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """Failure of a worker, counted from 1, which dies without notice at ``at_s``."""

    worker: int
    at_s: float


class KvLink(msgspec.Struct, frozen=True, kw_only=True):
    """Link for blocks of the KV cache between workers.

    ``bytes_per_token`` are a model's keys and values of one token, by default of a Llama 8B in 16
    bits: 2 x 32 layers x 8 heads x 128 numbers. ``bytes_per_s`` is a worker's bandwidth in each
    direction, by default 400 Gbit/s. ``overhead_s`` is the time of a pull beside its bytes, by
    default the real scheduler's assumption.
    """

    bytes_per_token: float = 131_072.0
    bytes_per_s: float = 50e9
    overhead_s: float = 0.005


class SimulationSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a simulation, the same for each policy.

    ``num_workers`` is by model, "" for each model of the trace that is not named. ``roles`` are
    those of each model's first workers. Others get roles in the same shares (empty: all have
    ``config.worker.role``). A worker dies at ``failures`` or after a random time with the mean
    ``mtbf_s`` (0: never), and is restarted ``restart_s`` later. A start takes
    ``config.worker.engine.simulation.start_s``. With ``config.scheduler.autoscale.max_workers`` the
    scheduler decides the number of workers. Requests that are not answered ``drain_s`` after the
    last arrival are unfinished. ``gpus_per_worker`` are paid for (None: the GPUs that its engine
    computes on).
    """

    config: Config
    num_workers: dict[str, int]
    roles: tuple[WorkerRole, ...] = ()
    link: KvLink = KvLink()
    seed: int = 0
    failures: tuple[Failure, ...] = ()
    mtbf_s: float = 0.0
    restart_s: float = 5.0
    drain_s: float = 3_600.0
    slo: Slo | None = None
    gpu_hour_price: float = 2.5
    currency: str = DEFAULT_CURRENCY
    gpus_per_worker: float | None = None

    def workers_of(self, model: str) -> int:
        """Return the first number of workers of a model. Raises ConfigError if it is not set."""
        count = self.num_workers.get(model, self.num_workers.get(""))
        if count is None:
            raise ConfigError(f"--workers does not say how many workers serve {model}")
        bounds = self.config.scheduler.autoscale
        if bounds.is_on:
            return min(max(count, bounds.min_workers), bounds.max_workers)
        return count

    @property
    def num_gpus_paid(self) -> float:
        """GPUs paid for one worker."""
        if self.gpus_per_worker is None:
            return float(self.config.worker.engine.tensor_parallel)
        return self.gpus_per_worker

    def role_of(self, index: int, present: Sequence[WorkerRole]) -> WorkerRole:
        """Return the role of a model's next worker, counted from 0, beside the ``present``
        roles."""
        if not self.roles:
            return self.config.worker.role
        return self.roles[index] if index < len(self.roles) else self.role_shares.next(present)

    @property
    def role_shares(self) -> RoleShares:
        """Shares of the roles among a model's workers."""
        return RoleShares(self.roles, self.config.scheduler.switch_roles)

    @property
    def moves_blocks(self) -> bool:
        """True if workers pull blocks of one another's KV cache.

        That is ``engine.transfer``, or by default whether workers have roles.
        """
        worker = self.config.worker
        asked = worker.engine.transfer
        has_roles = bool(self.roles) or worker.role is not WorkerRole.BOTH
        return worker.engine.prefix_cache and (has_roles if asked is None else asked)

    def check(self, models: Iterable[str]) -> None:
        """Raise ConfigError if the settings do not fit a trace with these ``models``."""
        total = sum(self.workers_of(model) for model in models)
        for failure in self.failures:
            if failure.worker > total:
                raise ConfigError(
                    f"--fail: there is no worker {failure.worker}, there are {total} at first"
                )
        engine = self.config.worker.engine
        if engine.transfer and not engine.prefix_cache:
            raise ConfigError("worker.engine.transfer needs worker.engine.prefix_cache, too")
        if self.roles and not self.moves_blocks:
            raise ConfigError(
                "--workers: roles move streams with pulled blocks, which "
                "needs worker.engine.prefix_cache and no worker.engine.transfer: false"
            )


_ORDERS = ("fair", "fifo", "shortest")
_PLACEMENTS = ("affine", "least_loaded")
# Single tenant of policies that do not tell tenants apart.
EVERYBODY = "everybody"


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """Scheduling policy.

    ``order`` "fair" is the scheduler's own: tiers by weight, tenants by tokens served. "shortest"
    is the same, but a tenant's shortest predicted answer comes first. "fifo" hides tenants and
    tiers from the scheduler, so only the order of arrival remains.
    """

    name: str
    order: Literal["fair", "fifo", "shortest"] = "fair"
    placement: Literal["affine", "least_loaded"] = "affine"

    @property
    def is_blind(self) -> bool:
        """True if jobs are published under one tenant in one tier."""
        return self.order == "fifo"

    def who(self, tenant: str, tier: Tier) -> tuple[str, Tier]:
        """Return the tenant and tier that the scheduler sees."""
        return (EVERYBODY, Tier.FREE) if self.is_blind else (tenant, tier)

    def configure(self, config: SchedulerConfig) -> SchedulerConfig:
        """Return the scheduler's settings under this policy."""
        config = msgspec.structs.replace(
            config,
            order="shortest" if self.order == "shortest" else "deadline",
            placement=self.placement,
        )
        if self.is_blind:
            plain = TierPolicy(weight=1.0)
            tiers = TierPolicies(enterprise=plain, pro=plain, free=plain, batch=plain)
            config = msgspec.structs.replace(config, tiers=tiers)
        return config


def parse_policies(text: str) -> tuple[Policy, ...]:
    """Read ``fair,fifo+least_loaded``: each is an order, a placement, or both.

    Raises ConfigError.
    """
    policies = tuple(_parse(name.strip()) for name in text.split(","))
    names = [policy.name for policy in policies]
    if len(set(names)) < len(names):
        raise ConfigError(f"--policy: {text!r} names a policy twice")
    return policies


def _parse(name: str) -> Policy:
    chosen: dict[str, str] = {}
    for word in name.split("+"):
        kind = "order" if word in _ORDERS else "placement"
        if word not in (*_ORDERS, *_PLACEMENTS) or kind in chosen:
            choices = f"{', '.join(_ORDERS)}; {', '.join(_PLACEMENTS)}"
            raise ConfigError(
                f"--policy: {name!r} is not an order, a placement, or the two joined by a plus "
                f"sign. There are: {choices}."
            )
        chosen[kind] = word
    return msgspec.convert({"name": name, **chosen}, Policy)

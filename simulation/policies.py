"""The ways to schedule that can be compared, and what each is to the scheduler."""

from __future__ import annotations

from typing import Literal

import msgspec

from millrace.schemas.config import SchedulerConfig, TierPolicies, TierPolicy
from millrace.schemas.errors import ConfigError
from millrace.schemas.jobs import Tier

_ORDERS = ("fair", "fifo", "shortest")
_PLACEMENTS = ("affine", "least_loaded")
# Whom everybody is where nobody is told apart.
EVERYBODY = "everybody"


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """``order`` "fair" is the scheduler's own: tiers by weight, tenants by tokens served.
    "shortest" is the same, but of one tenant the shortest predicted answer comes first. "fifo"
    tells the scheduler of no tenants and tiers, so that arrival is all there is."""

    name: str
    order: Literal["fair", "fifo", "shortest"] = "fair"
    placement: Literal["affine", "least_loaded"] = "affine"

    @property
    def is_blind(self) -> bool:
        """Jobs are published as everybody's, in one tier."""
        return self.order == "fifo"

    def who(self, tenant: str, tier: Tier) -> tuple[str, Tier]:
        """Whose a request is, as far as the scheduler knows."""
        return (EVERYBODY, Tier.FREE) if self.is_blind else (tenant, tier)

    def configure(self, config: SchedulerConfig) -> SchedulerConfig:
        """The scheduler's settings under this policy."""
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
    """Read ``fair,fifo+least_loaded``: in each an order, a placement, or both. Raises
    ConfigError."""
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

"""Synthetic traces: arrivals, tenants, and shared prefixes."""

from __future__ import annotations

import math
import random
from bisect import bisect
from collections.abc import Iterable, Iterator
from enum import StrEnum
from itertools import accumulate

import msgspec

from millrace.bench.arrivals import arrival_times
from millrace.bench.spread import Spread
from millrace.schemas.errors import ConfigError
from millrace.schemas.jobs import Tier
from millrace.simulation.traces.trace import TraceRequest

_MAX_TENANTS = 100_000


class TraceKind(StrEnum):
    """Arrival process: Poisson, bursty, diurnal, or conversations.

    Conversations begin at random and continue when their user has read and typed.
    """

    POISSON = "poisson"
    BURSTY = "bursty"
    DIURNAL = "diurnal"
    MULTITURN = "multiturn"


class TenantShare(msgspec.Struct, frozen=True, kw_only=True):
    """Tenant with its weight in the load."""

    name: str
    tier: Tier = Tier.FREE
    weight: float = 1.0


class TraceRecipe(msgspec.Struct, frozen=True, kw_only=True):
    """Recipe of a trace.

    ``rate_per_s`` counts requests, including turns of conversations. ``burstiness`` is the shape of
    the gaps' gamma distribution: 1 is Poisson, lower is burstier. ``swing`` is the relative
    amplitude of a diurnal rate about its mean, within ``period_s``. Conversations have ``turns``
    and pauses of ``think_s`` in the mean. Each turn adds ``input_tokens`` to the previous text.
    Prompts begin with one of ``num_system_prompts`` of ``system_tokens``. ``max_tokens`` 0: each
    request states the actual length of its answer.
    """

    kind: TraceKind
    rate_per_s: float
    duration_s: float
    tenants: tuple[TenantShare, ...]
    input_tokens: Spread
    output_tokens: Spread
    model: str = "demo"
    burstiness: float = 0.2
    swing: float = 0.8
    period_s: float = 86_400.0
    turns: float = 5.0
    think_s: float = 20.0
    num_system_prompts: int = 0
    system_tokens: int = 0
    max_tokens: int = 0
    deadline_s: float | None = None
    seed: int = 0


def synthesise(recipe: TraceRecipe) -> list[TraceRequest]:
    """Return the requests in order of arrival, the same for the same recipe."""
    draw = _Draw(recipe)
    if recipe.kind is TraceKind.MULTITURN:
        requests: Iterable[TraceRequest] = (
            turn
            for number, at_s in enumerate(_starts_of_conversations(recipe), start=1)
            for turn in draw.conversation(f"s{number}", at_s)
        )
        return sorted(requests, key=lambda request: request.at_s)
    return [draw.request(at_s) for at_s in _arrivals(recipe)]


def _starts_of_conversations(recipe: TraceRecipe) -> Iterator[float]:
    rate_per_s = recipe.rate_per_s / recipe.turns
    yield from map(float, arrival_times(rate_per_s, 1.0, recipe.duration_s, None, recipe.seed))


def _arrivals(recipe: TraceRecipe) -> Iterator[float]:
    seed, duration_s = recipe.seed, recipe.duration_s
    if recipe.kind is not TraceKind.DIURNAL:
        shape = recipe.burstiness if recipe.kind is TraceKind.BURSTY else 1.0
        yield from map(float, arrival_times(recipe.rate_per_s, shape, duration_s, None, seed))
        return
    # Thin out a Poisson process at the peak rate. A day begins at its mean.
    keep = random.Random(f"{seed} keep")
    peak = 1 + recipe.swing
    for at_s in arrival_times(recipe.rate_per_s * peak, 1.0, duration_s, None, seed):
        level = 1 + recipe.swing * math.sin(2 * math.pi * at_s / recipe.period_s)
        if keep.random() * peak < level:
            yield float(at_s)


class _Draw:
    """Generator of requests, one after the other."""

    def __init__(self, recipe: TraceRecipe) -> None:
        self._recipe = recipe
        self._source = random.Random(f"{recipe.seed} requests")
        self._reached = list(accumulate(tenant.weight for tenant in recipe.tenants))

    def request(self, at_s: float) -> TraceRequest:
        prefix = self._system_prompt()
        num_input = self._recipe.input_tokens.draw(self._source)
        return self._made(at_s, self._tenant(), num_input, self._num_output(), prefix, "")

    def conversation(self, session: str, at_s: float) -> Iterator[TraceRequest]:
        """Yield the turns that begin within the trace; their number is geometric."""
        recipe, tenant, prefix = self._recipe, self._tenant(), self._system_prompt()
        num_said = 0
        while at_s < recipe.duration_s:
            num_said += recipe.input_tokens.draw(self._source)
            num_output = self._num_output()
            yield self._made(at_s, tenant, num_said, num_output, prefix, session)
            num_said += num_output
            if self._source.random() * recipe.turns < 1:
                return
            at_s += self._source.expovariate(1 / recipe.think_s)

    def _made(
        self,
        at_s: float,
        tenant: TenantShare,
        num_own: int,
        num_output: int,
        prefix: tuple[tuple[str, int], ...],
        session: str,
    ) -> TraceRequest:
        recipe = self._recipe
        return TraceRequest(
            at_s=round(at_s, 6),
            prompt_tokens=num_own + sum(count for _, count in prefix),
            output_tokens=num_output,
            tenant=tenant.name,
            tier=tenant.tier,
            model=recipe.model,
            session=session,
            prefix=prefix,
            max_tokens=recipe.max_tokens or None,
            deadline_s=recipe.deadline_s,
        )

    def _num_output(self) -> int:
        num_tokens = self._recipe.output_tokens.draw(self._source)
        return min(num_tokens, self._recipe.max_tokens or num_tokens)

    def _tenant(self) -> TenantShare:
        place = bisect(self._reached, self._source.random() * self._reached[-1])
        return self._recipe.tenants[min(place, len(self._recipe.tenants) - 1)]

    def _system_prompt(self) -> tuple[tuple[str, int], ...]:
        recipe = self._recipe
        if not recipe.num_system_prompts or not recipe.system_tokens:
            return ()
        number = self._source.randint(1, recipe.num_system_prompts)
        return ((f"system-{number}", recipe.system_tokens),)


def parse_tenants(text: str) -> tuple[TenantShare, ...]:
    """Read a number, or ``quiet:pro:1,noisy:pro:10`` (name:tier:weight, the last two optional).

    Raises ConfigError.
    """
    if text.isdecimal():
        if not 1 <= int(text) <= _MAX_TENANTS:
            raise ConfigError(f"--tenants can be 1 to {_MAX_TENANTS}, got {text}")
        return tuple(TenantShare(name=f"t{number}") for number in range(1, int(text) + 1))
    return tuple(map(_tenant_share, text.split(",")))


def _tenant_share(text: str) -> TenantShare:
    name, *rest = text.strip().split(":")
    try:
        tier = Tier(rest[0]) if rest and rest[0] else Tier.FREE
        weight = float(rest[1]) if len(rest) > 1 else 1.0
    except ValueError as error:
        raise ConfigError(f"--tenants: {text!r}: {error}") from error
    if not name or len(rest) > 2 or not 0 < weight < math.inf:
        raise ConfigError(f"--tenants: {text!r} is not NAME, NAME:TIER or NAME:TIER:WEIGHT")
    return TenantShare(name=name, tier=tier, weight=weight)

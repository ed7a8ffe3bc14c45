"""``prediction``: the predicted first token compared with the actual one.

The real scheduler runs in virtual time with simulated workers, as in ``millrace simulate``, so the
figures do not depend on the machine. Each load makes requests wait. When it is sent, every request
records the scheduler's latest prediction of its tenant's first token, like a gateway. The figure is
the factor, up or down, between prediction and result, for requests with a predicted or actual wait
of at least a second. No prediction is exact, because answers have unknown lengths: drawn evenly
from a half to one and a half of a mean.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

from benchmarks.support.command import PartResult
from benchmarks.support.figures import percentile, table
from millrace.schemas.config import (
    Config,
    EngineConfig,
    NatsConfig,
    SchedulerConfig,
    SimulationConfig,
    TierPolicies,
    TierPolicy,
    WorkerConfig,
)
from millrace.schemas.engines import EngineKind
from millrace.schemas.jobs import Tier
from millrace.simulation.outcomes import RequestOutcome
from millrace.simulation.settings import SimulationSettings, parse_policies
from millrace.simulation.traces.trace import TraceRequest
from millrace.simulation.world import simulate

_NUM_SLOTS = 16
_SIMULATION = SimulationConfig(prefill_tokens_per_s=4_000.0, step_ms=15.0, step_ms_per_sequence=0.2)
_PROMPT_TOKENS, _MEAN_TOKENS = 60, 160
_WARM_UP_S = 20.0
_QUEUED_S = 1.0
_RATIO_GOAL = 1.5


class Load(NamedTuple):
    """Trace of a number of seconds, for a number of workers."""

    name: str
    num_workers: int
    make: Callable[[random.Random, float], list[TraceRequest]]


class Accuracy(NamedTuple):
    """Accuracy of predictions.

    ``ratios`` are predicted over actual TTFT, or the inverse if above, of requests that waited.
    ``num_unknown`` requests waited without a prediction.
    """

    ratios: list[float]
    num_unknown: int
    mean_wait_s: float

    @property
    def p90(self) -> float:
        return percentile(self.ratios, 0.9)


def accuracy_of(outcomes: Sequence[RequestOutcome], end_s: float) -> Accuracy:
    """Evaluate requests sent after the warm-up and answered before all clients stop."""
    ratios: list[float] = []
    waits_s: list[float] = []
    num_unknown = 0
    for outcome in outcomes:
        if outcome.sent_s < _WARM_UP_S or not 0 <= outcome.first_s <= end_s:
            continue
        actual_s = outcome.first_s - outcome.sent_s
        if outcome.predicted_ttft_ms is None:
            num_unknown += 1
            continue
        predicted_s = outcome.predicted_ttft_ms / 1e3
        if max(actual_s, predicted_s) >= _QUEUED_S:
            waits_s.append(actual_s)
            ratios.append(max(predicted_s / actual_s, actual_s / predicted_s))
    return Accuracy(ratios, num_unknown, sum(waits_s) / max(len(waits_s), 1))


def settings_for(num_workers: int) -> SimulationSettings:
    """Return settings under which no request is refused for its predicted wait."""
    plain = {tier.value: TierPolicy(weight=1.0) for tier in Tier}
    weights = {"enterprise": TierPolicy(weight=8.0), "pro": TierPolicy(weight=4.0)}
    scheduler = SchedulerConfig(tiers=TierPolicies(**(plain | weights)), lease_extend_s=40.0)
    engine = EngineConfig(
        kind=EngineKind.SIMULATED,
        simulation=_SIMULATION,
        max_num_sequences=_NUM_SLOTS,
        max_batch_tokens=512,
        num_blocks=8_000,
    )
    worker = WorkerConfig(heartbeat_s=0.5, lease_extend_s=40.0, max_num_waiting=2, engine=engine)
    config = Config(nats=NatsConfig(ack_wait_s=120.0), scheduler=scheduler, worker=worker)
    return SimulationSettings(config=config, num_workers={"": num_workers}, drain_s=3_600.0)


def _request(chance: random.Random, at_s: float, tenant: str, tier: Tier) -> TraceRequest:
    return TraceRequest(
        at_s=at_s,
        tenant=tenant,
        tier=tier,
        prompt_tokens=_PROMPT_TOKENS,
        output_tokens=chance.randint(_MEAN_TOKENS // 2, _MEAN_TOKENS * 3 // 2),
        max_tokens=_MEAN_TOKENS * 4,
    )


def _poisson(
    chance: random.Random, per_s: float, seconds: float, tenant: str, tier: Tier = Tier.FREE
) -> list[TraceRequest]:
    at_s, trace = 0.0, list[TraceRequest]()
    while (at_s := at_s + chance.expovariate(per_s)) < seconds:
        trace.append(_request(chance, at_s, tenant, tier))
    return trace


def _one_tenant(chance: random.Random, seconds: float) -> list[TraceRequest]:
    """Return a load a fifth above capacity: the queue grows."""
    return _poisson(chance, 6.3, seconds, "busy")


def _bursts(chance: random.Random, seconds: float) -> list[TraceRequest]:
    """Return bursts of forty requests within four seconds, and sparse ones of another tenant."""
    trace = _poisson(chance, 0.5, seconds, "calm")
    for start_s in range(0, int(seconds), 12):
        trace += [
            _request(chance, start_s + number / 10, "bursts", Tier.FREE) for number in range(40)
        ]
    return trace


def _tenants(chance: random.Random, seconds: float) -> list[TraceRequest]:
    """Return one tenant with a backlog, one at its share, and some with little load."""
    trace = _poisson(chance, 9.0, seconds, "backlogged") + _poisson(chance, 3.0, seconds, "steady")
    for number in range(4):
        trace += _poisson(chance, 0.2, seconds, f"quiet-{number}")
    return trace


def _tiers(chance: random.Random, seconds: float) -> list[TraceRequest]:
    """Return three tiers, of which the two lower ones wait."""
    return [
        *_poisson(chance, 1.0, seconds, "e", Tier.ENTERPRISE),
        *_poisson(chance, 5.0, seconds, "p", Tier.PRO),
        *_poisson(chance, 1.0, seconds, "f", Tier.FREE),
    ]


LOADS = (
    Load("one tenant", 1, _one_tenant),
    Load("bursts", 1, _bursts),
    Load("tenants", 2, _tenants),
    Load("tiers", 1, _tiers),
)


def run_load(load: Load, seconds: float) -> Accuracy:
    trace = sorted(load.make(random.Random(5), seconds), key=lambda request: request.at_s)
    policy = parse_policies("fair")[0]
    outcomes = simulate(trace, settings_for(load.num_workers), policy).outcomes
    return accuracy_of(outcomes, seconds)


def run(seconds: float = 120.0) -> PartResult:
    """Run each load for ``seconds`` of virtual time."""
    rows = []
    all_met = True
    for load in LOADS:
        found = run_load(load, seconds)
        p50, p99 = percentile(found.ratios, 0.5), percentile(found.ratios, 0.99)
        factors = (f"{factor:.2f}" for factor in (p50, found.p90, p99))
        wait = f"{found.mean_wait_s:.1f}"
        rows.append((load.name, f"{len(found.ratios)}", wait, *factors, f"{found.num_unknown}"))
        all_met = all_met and found.p90 <= _RATIO_GOAL
    print(table(("load", "waited", "mean s", "wrong by p50", "p90", "p99", "unknown"), rows))
    print(f"goal: p90 at most {_RATIO_GOAL}")
    return PartResult(None, all_met)

"""Tiers beside one another, on workers that really preempt, in virtual time."""

from __future__ import annotations

import pytest

from benchmarks.support.figures import percentile
from millrace.schemas.config import SimulationConfig
from millrace.schemas.jobs import Tier
from millrace.schemas.records import Status
from millrace.simulation.outcomes import RequestOutcome
from tests.cli.simulate.simulating import make_request, make_settings, run_trace

_SIMULATION = SimulationConfig(prefill_tokens_per_s=4_000.0, step_ms=15.0, step_ms_per_sequence=0.2)
_OUTPUT_WEIGHT = 2


def outcomes_of(
    num_free: int,
    num_enterprise: int,
    gap_s: float,
    free_tokens: int,
    enterprise_tokens: int,
    drain_s: float = 300.0,
) -> dict[Tier, list[RequestOutcome]]:
    """Simulate one worker full of free streams when enterprise requests begin at 5 s."""
    few = {"tier": Tier.FREE, "prompt_tokens": 20, "output_tokens": free_tokens}
    free = [make_request(0.001 * n, tenant=f"f{n % 3}", **few) for n in range(num_free)]
    enterprise = [
        make_request(
            5.0 + n * gap_s, tenant="e", tier=Tier.ENTERPRISE, output_tokens=enterprise_tokens
        )
        for n in range(num_enterprise)
    ]
    settings = make_settings(
        1, slots=16, waiting=4, simulation=_SIMULATION, num_blocks=8_000, drain_s=drain_s
    )
    found: dict[Tier, list[RequestOutcome]] = {Tier.FREE: [], Tier.ENTERPRISE: []}
    for outcome in run_trace([*free, *enterprise], settings).outcomes:
        found[outcome.request.tier].append(outcome)
    return found


@pytest.mark.parametrize(("num_free", "free_tokens"), [(400, 64), (100, 256), (32, 1_500)])
def test_a_worker_full_of_free_streams_answers_an_enterprise_request_at_once(
    num_free: int, free_tokens: int
) -> None:
    """10 tokens every 0.5 s, for 20 s in which more free streams wait than run."""
    found = outcomes_of(num_free, 40, 0.5, free_tokens, 10)
    ttfts_s = [one.first_s - one.sent_s for one in found[Tier.ENTERPRISE]]
    assert percentile(ttfts_s, 0.99) <= 0.15
    assert all(one.status is Status.DONE for one in found[Tier.FREE])


@pytest.mark.parametrize(
    ("free_tokens", "enterprise_tokens"),
    [
        pytest.param(
            256, 50, marks=pytest.mark.slow(reason="the other case checks the same weight")
        ),
        (100, 200),
    ],
)
def test_a_flood_of_enterprise_requests_gets_its_weight_and_no_more(
    free_tokens: int, enterprise_tokens: int
) -> None:
    """40 s of more than there is, of both: eight to one, as near as the requests are small."""
    begin_s, end_s, drain_s = 10.0, 45.0, 0.01
    found = outcomes_of(200, 1_600, 0.025, free_tokens, enterprise_tokens, drain_s)
    served = {
        tier: sum(_served(one, begin_s, end_s) for one in outcomes)
        for tier, outcomes in found.items()
    }
    assert served[Tier.FREE] > 0
    assert 5 <= served[Tier.ENTERPRISE] / served[Tier.FREE] <= 12


def _served(outcome: RequestOutcome, begin_s: float, end_s: float) -> float:
    """The service that it was given in a part of the time, as if it ran evenly."""
    if outcome.first_s < 0 or outcome.first_s >= end_s:
        return 0.0
    over_s = outcome.end_s if outcome.end_s >= 0 else end_s
    inside_s = min(over_s, end_s) - max(outcome.first_s, begin_s)
    share = max(inside_s, 0.0) / max(over_s - outcome.first_s, 1e-9)
    prompt_tokens = outcome.request.prompt_tokens if outcome.first_s >= begin_s else 0
    return prompt_tokens + _OUTPUT_WEIGHT * outcome.num_tokens * share

"""Requests as they may be, one after the other."""

from __future__ import annotations

import asyncio

from millrace.schemas.jobs import Tier
from millrace.schemas.sampling import SamplingParams
from tests.protocol.system import System

GATEWAYS = ("gateway-1", "gateway-2")
LENGTHS_TOKENS = (1, 2, 8, 20, 60, 100)
LIVES_S = (0.0, 0.0, 0.0, 0.0, 0.5, 3.0)
MOST_REQUESTS = 60


def ask_something(
    it: System,
    gateway: str,
    max_tokens: int,
    lives_s: float = 0.0,
    *,
    is_for_nobody: bool = False,
    is_stored: bool = False,
) -> None:
    """Send one request of a random tier and tenant. ``lives_s`` 0 means no deadline."""
    if len(it.asked) >= MOST_REQUESTS:
        return
    number, now_ns = len(it.asked), it.clock.now_ns()
    question = it.question(
        request_id=f"r{number}",
        prompt_token_ids=(40, 41, 42 + number),
        sampling=SamplingParams(max_tokens=max_tokens, seed=number, ignore_eos=True),
        reply="" if is_for_nobody else gateway,
        batch_frames=True,
        store_result=is_stored,
        tier=it.draw.choice(list(Tier)),
        tenant=it.draw.choice("ab"),
        received_ns=now_ns,
        deadline_ns=now_ns + round(lives_s * 1e9) if lives_s else None,
    )
    it.ask(question, gateway)


async def keep_asking(it: System, per_s: float) -> None:
    """Runs until it is cancelled."""
    draw = it.draw
    while True:
        await asyncio.sleep(draw.expovariate(per_s))
        ask_something(
            it,
            draw.choice(GATEWAYS),
            draw.choice(LENGTHS_TOKENS),
            draw.choice(LIVES_S),
            is_for_nobody=draw.random() < 0.2,
            is_stored=draw.random() < 0.4,
        )

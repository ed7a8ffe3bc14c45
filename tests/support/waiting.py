"""Waiting for a condition with a deadline, instead of sleeping and hoping."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

_POLL_S = 0.01
# Only a failing test waits this long. It is long because a busy machine delays every part.
_DEADLINE_S = 30.0


async def eventually(
    predicate: Callable[[], bool] | Callable[[], Awaitable[bool]],
    timeout_s: float = _DEADLINE_S,
    what: str = "the condition",
    poll_s: float = _POLL_S,
) -> None:
    """Return as soon as ``predicate`` holds; AssertionError after ``timeout_s``. A predicate that
    costs CPU, such as a query of a store, is better asked less often: ``poll_s``."""
    deadline = time.monotonic() + timeout_s
    while True:
        outcome = predicate()
        if isinstance(outcome, Awaitable):
            outcome = await outcome
        if outcome:
            return
        if time.monotonic() > deadline:
            raise AssertionError(f"{what} did not hold within {timeout_s} s")
        await asyncio.sleep(poll_s)

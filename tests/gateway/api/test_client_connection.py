"""Waits for an HTTP client's connection."""

from __future__ import annotations

import asyncio

import pytest

from millrace.gateway.api.answers import HttpClient
from millrace.runtime.virtual_time import VirtualClock, run_virtual


def _client() -> HttpClient:
    return HttpClient(1_000, lambda: None)


def test_a_wait_says_whether_something_happened_in_time() -> None:
    async def main(clock: VirtualClock) -> None:
        client = _client()
        assert not await client.wait_up_to(15.0)
        assert clock.monotonic() == 15.0
        asyncio.get_running_loop().call_later(5.0, client.call)
        assert await client.wait_up_to(15.0)
        assert clock.monotonic() == 20.0

    run_virtual(main)


def test_what_happened_before_the_wait_ends_it_at_once() -> None:
    async def main(clock: VirtualClock) -> None:
        client = _client()
        client.disconnect("disconnected")
        assert await client.wait_up_to(15.0)
        assert not await client.wait_up_to(1.0)
        assert clock.monotonic() == 1.0

    run_virtual(main)


def test_a_wait_that_is_cancelled_leaves_no_timer_behind() -> None:
    async def main(clock: VirtualClock) -> None:
        client = _client()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.0):
                await client.wait_up_to(15.0)
        # The first wait's time is over in the midst of this one.
        assert not await client.wait_up_to(20.0)
        assert clock.monotonic() == 21.0

    run_virtual(main)

"""The link to Redis: a command that cannot be sent is its caller's trouble only."""

from __future__ import annotations

import asyncio

import pytest

from bus.redis_link import RedisLink
from schemas.config import RedisConfig
from tests.support.servers import RedisServer


async def test_a_command_that_cannot_be_sent_raises_and_the_next_is_served(
    redis_server: RedisServer,
) -> None:
    link = RedisLink(RedisConfig(url=f"{redis_server.url}/0"))
    async with asyncio.timeout(5.0):
        with pytest.raises(UnicodeEncodeError):
            await link.call("SET", "half a character", "\ud800")
        assert await link.call("PING") in (b"PONG", True)
    assert not link.is_away
    await link.close()

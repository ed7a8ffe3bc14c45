"""The link to Redis: a command that cannot be sent or is refused is its caller's trouble only."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis

from runtime.redis.link import RedisLink, RedisUnreachableError, Script
from schemas.config import RedisConfig
from tests.support.servers import RedisServer

_PUSH = Script("return redis.call('RPUSH', KEYS[1], ARGV[1])")


@pytest.fixture
async def link(redis_server: RedisServer) -> AsyncIterator[RedisLink]:
    client = Redis.from_url(redis_server.url)
    await client.flushall()
    await client.aclose()
    made = RedisLink(RedisConfig(url=f"{redis_server.url}/0"))
    async with asyncio.timeout(5.0):
        yield made
    await made.close()


async def test_a_command_that_cannot_be_sent_raises_and_the_next_is_served(link: RedisLink) -> None:
    with pytest.raises(UnicodeEncodeError):
        await link.call("SET", "half a character", "\ud800")
    assert await link.call("PING") in (b"PONG", True)


async def test_a_command_that_is_refused_is_told_once_by_its_name(
    link: RedisLink, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "runtime.redis.link")
    await link.call("SET", "private-key", "private value")
    for _ in range(2):
        with pytest.raises(RedisUnreachableError):
            await link.call("RPUSH", "private-key", "private value")
        assert await link.call("GET", "private-key") == b"private value"
    assert _told(caplog) == [("ERROR", "RPUSH")]
    assert "WRONGTYPE" in caplog.records[0].__dict__["cause"]
    assert await link.call("RPUSH", "other", "private value") == 1
    assert _told(caplog) == [("ERROR", "RPUSH"), ("INFO", "RPUSH")]
    with pytest.raises(RedisUnreachableError):
        await link.call("NOSUCH", "private-key", "private value")
    assert _told(caplog)[-1] == ("ERROR", "NOSUCH")
    assert "private" not in "".join(str(record.__dict__) for record in caplog.records)


async def test_a_script_is_told_by_its_digest_whether_the_server_knew_it_or_not(
    link: RedisLink, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "runtime.redis.link")
    await link.call("SET", "text", "a")
    for _ in range(2):
        with pytest.raises(RedisUnreachableError):
            await link.evaluate(_PUSH, ["text"], ["b"])
    assert await link.evaluate(_PUSH, ["list"], ["b"]) == 1
    name = f"EVALSHA {_PUSH.sha}"
    assert _told(caplog) == [("ERROR", name), ("INFO", name)]


async def test_the_others_that_travel_with_a_refused_command_are_served(link: RedisLink) -> None:
    await link.call("SET", "text", "a")
    refused = asyncio.create_task(link.call("INCR", "text"))
    assert await link.call("GET", "text") == b"a"
    with pytest.raises(RedisUnreachableError):
        await refused


def _told(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    return [(record.levelname, record.__dict__["command"]) for record in caplog.records]

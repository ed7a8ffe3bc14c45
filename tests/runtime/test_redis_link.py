"""Link to Redis: an unsent or refused command fails for its caller only."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis

from millrace.runtime.redis.link import RedisLink, RedisUnreachableError, Script
from millrace.schemas.config import RedisConfig
from tests.support.servers import RedisServer
from tests.support.waiting import eventually

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
    caplog.set_level(logging.INFO, "millrace.runtime.redis.link")
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
    caplog.set_level(logging.INFO, "millrace.runtime.redis.link")
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


async def test_replies_go_to_their_callers_whoever_still_waits(link: RedisLink) -> None:
    await link.call("SET", "a", "1")
    left = asyncio.create_task(link.call("GET", "a"))
    stays = asyncio.create_task(link.call("INCR", "a"))
    await asyncio.sleep(0)
    left.cancel()
    assert await stays == 2
    texts = [f"{number}" * 10_000 for number in range(20)]
    await asyncio.gather(*(link.call("SET", f"k{n}", text) for n, text in enumerate(texts)))
    found = await asyncio.gather(*(link.call("GET", f"k{n}") for n in range(len(texts))))
    assert found == [text.encode() for text in texts]


async def test_a_connection_that_the_server_closed_is_made_anew_unseen(
    link: RedisLink, redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    await link.call("SET", "a", "b")
    client = Redis.from_url(redis_server.url)
    for _ in range(2):
        await client.client_kill_filter(_type="normal", skipme=True)
        await client.ping()
        assert await link.call("GET", "a") == b"b"
    await client.aclose()
    assert not caplog.records


async def test_late_reply_is_dropped(link: RedisLink, redis_server: RedisServer) -> None:
    await link.call("SET", "a", "b")
    client = Redis.from_url(redis_server.url)
    await client.client_pause(600)
    with pytest.raises(RedisUnreachableError):
        await link.call("GET", "a")
    with pytest.raises(RedisUnreachableError):
        await link.call("INCR", "number")  # the link does not try again for a second
    await client.client_unpause()
    await client.aclose()

    async def is_back() -> bool:
        try:
            return bool(await link.call("STRLEN", "a") == 1)
        except RedisUnreachableError:
            return False

    await eventually(is_back, 10.0, "Redis is asked again")


async def test_process_that_stood_still_does_not_take_the_server_for_silent(
    link: RedisLink, redis_server: RedisServer
) -> None:
    """A machine that pauses, or has no CPU time to give, stops both ends."""
    await link.call("SET", "a", "b")
    redis_server.pause()
    try:
        reading = asyncio.create_task(link.call("GET", "a"))
        for _ in range(3):
            await asyncio.sleep(0)  # it is on its way then
        time.sleep(0.6)  # noqa: ASYNC251  the fault: our event loop stands still, too
        for _ in range(3):
            await asyncio.sleep(0)  # it is the first to go on
    finally:
        redis_server.resume()
    assert await reading == b"b"


async def test_connection_to_another_server_than_redis_is_closed() -> None:
    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # The first commands of redis-py are acknowledged; the next reply is no Redis reply.
        while data := await reader.read(4_096):
            packed = data.count(b"CLIENT") or data.count(b"SELECT")
            writer.write(b"+OK\r\n" * packed if packed else b"HTTP/1.1 400 Bad Request\r\n")
        writer.close()

    server = await asyncio.start_server(greet, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    link = RedisLink(RedisConfig(url=f"redis://127.0.0.1:{port}/0"))
    async with asyncio.timeout(5.0):
        with pytest.raises(RedisUnreachableError):
            await link.call("GET", "a")
        await link.close()
    server.close()

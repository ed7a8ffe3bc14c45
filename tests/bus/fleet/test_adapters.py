"""The adapters that there are: on a real redis-server, seen by every process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest
from redis.asyncio import Redis

from millrace.bus.fleet.adapters import AdapterDirectory, AdapterStore
from millrace.runtime.redis.link import RedisLink
from millrace.schemas.config import RedisConfig
from millrace.schemas.models.adapters import Adapter, AdapterNotFoundError, AdapterTakenError
from tests.support.manual_clock import ManualClock
from tests.support.servers import RedisServer

SQL = Adapter(name="sql", version="1", source="/sql", model="base")
POEMS = Adapter(name="poems", version="1", source="/poems", model="base", tenants=("acme",))


@pytest.fixture
async def link(redis_server: RedisServer) -> AsyncIterator[RedisLink]:
    client = Redis.from_url(redis_server.url)
    await client.flushall()
    await client.aclose()
    link = RedisLink(RedisConfig(url=redis_server.url))
    yield link
    await link.close()


@pytest.fixture
def store(link: RedisLink) -> AdapterStore:
    return AdapterStore(link)


def _later(adapter: Adapter, version: str) -> Adapter:
    return msgspec.structs.replace(adapter, version=version)


async def test_adapters_come_and_go(store: AdapterStore) -> None:
    await store.add(SQL)
    await store.add(POEMS)
    assert await store.all() == [POEMS, SQL]
    assert await store.find("sql") == SQL
    assert await store.remove("sql") == SQL
    assert await store.all() == [POEMS]
    assert await store.find("sql") is None
    with pytest.raises(AdapterNotFoundError, match="no adapter 'sql'"):
        await store.remove("sql")


async def test_former_versions_stay_for_what_runs_with_them(store: AdapterStore) -> None:
    await store.add(SQL)
    newer = _later(SQL, "2")
    await store.add(newer, replace=True)
    await store.remove("sql")
    assert await store.find("sql", "1") == SQL
    assert await store.find("sql", "2") == newer
    assert await store.find("sql", "3") is None
    assert await store.find("sql") is None


async def test_one_of_several_concurrent_claims_gets_an_adapter_name(store: AdapterStore) -> None:
    each = [_later(SQL, str(number)) for number in range(8)]
    done = await asyncio.gather(*(store.add(one) for one in each), return_exceptions=True)
    taken = [one for one, result in zip(each, done, strict=True) if result is None]
    assert len(taken) == 1
    assert sum(isinstance(result, AdapterTakenError) for result in done) == 7
    assert await store.find("sql") == taken[0]


async def test_every_directory_knows_within_a_second(link: RedisLink, store: AdapterStore) -> None:
    clock = ManualClock()
    directory = AdapterDirectory(link, clock)
    await store.add(SQL)
    assert directory.known("sql", "acme") is None
    await directory.look()
    assert directory.known("sql", "acme") == SQL
    await store.add(_later(SQL, "2"), replace=True)
    await directory.look()
    assert directory.known("sql", "acme") == _later(SQL, "2")
    assert await directory.version("sql", "1") == SQL
    await store.remove("sql")
    await directory.look()
    assert directory.known("sql", "acme") is None
    await directory.close()


async def test_one_that_was_just_added_is_found_when_it_is_asked_for(
    link: RedisLink, store: AdapterStore
) -> None:
    directory = AdapterDirectory(link, ManualClock())
    await store.add(SQL)
    assert await directory.find("sql", "acme") == SQL
    assert await directory.find("base:sql", "acme") == SQL
    for unknown in ("other:sql", "sql:sql", "base:", ":sql", "base"):
        assert await directory.find(unknown, "acme") is None, unknown


async def test_a_private_adapter_is_visible_to_its_tenant_alone(
    link: RedisLink, store: AdapterStore
) -> None:
    directory = AdapterDirectory(link, ManualClock())
    await store.add(POEMS)
    assert await directory.find("base:poems", "acme") == POEMS
    assert await directory.find("base:poems", "other") is None
    assert await directory.find("poems", "other") is None


async def test_without_redis_there_are_none_and_with_a_dead_one_they_stay(
    link: RedisLink, store: AdapterStore
) -> None:
    none = AdapterDirectory(None, ManualClock())
    none.start()
    assert await none.find("sql", "acme") is None
    assert await none.version("sql", "1") is None
    directory = AdapterDirectory(link, ManualClock())
    await store.add(SQL)
    await directory.look()
    await link.close()
    await directory.look()
    assert directory.known("sql", "acme") == SQL
    assert await directory.version("sql", "1") == SQL

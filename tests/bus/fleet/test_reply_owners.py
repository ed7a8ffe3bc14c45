"""Owner of a reply subject, by its name and by the tenants in a real redis-server."""

from __future__ import annotations

import pytest

from millrace.bus.fleet.directories import ReplyOwners
from millrace.bus.tenancy.tenants import TenantStore
from millrace.runtime.redis.link import RedisLink
from millrace.schemas.config import RedisConfig
from millrace.schemas.tenants import TenantRecord
from tests.support.servers import RedisServer, free_port

_BY_NAME = [
    ("shop", "", False),
    ("shop", "shop", False),
    ("shop", "shop/mailer", False),
    ("shop", "shopping", True),
    ("shop", "acme", True),
    ("shop", "acme/shop", True),
    ("shop", "local", True),
    ("local", "", False),
    ("local", "local", False),
    ("local", "local/one", False),
    ("local", "anything", False),
    ("local", "acme/one", True),
]


async def test_tenants_that_are_known(redis_server: RedisServer) -> None:
    link = RedisLink(RedisConfig(url=f"{redis_server.url}/0"))
    await link.call("FLUSHALL")
    owners = ReplyOwners(link)
    for tenant, reply, is_foreign in _BY_NAME:
        assert await owners.is_foreign(tenant, reply) is is_foreign, (tenant, reply)
    assert not await owners.is_foreign("local", "acme")
    await TenantStore(link).change_tenant(
        "acme", lambda _known: TenantRecord(keep_transcripts=True)
    )
    assert await owners.is_foreign("local", "acme")
    assert not await owners.is_foreign("acme", "acme")
    await link.close()


@pytest.mark.parametrize("is_away", [True, False])
async def test_without_redis_the_name_decides_the_owner(*, is_away: bool) -> None:
    config = RedisConfig(url=f"redis://127.0.0.1:{free_port()}")
    link = RedisLink(config) if is_away else None
    owners = ReplyOwners(link)
    for tenant, reply, is_foreign in [*_BY_NAME, ("local", "acme", False)]:
        assert await owners.is_foreign(tenant, reply) is is_foreign, (tenant, reply)
    if link is not None:
        await link.close()

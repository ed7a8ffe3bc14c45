"""A browser for each file of tests, and the page over a real or a scripted gateway."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio
from playwright.async_api import Browser, Page

from millrace.schemas.config import RedisConfig
from tests.gateway.page.windows import (
    Watched,
    ready,
    watched,
)
from tests.support.running_gateway import RunningGateway, running_gateway
from tests.support.scripted_gateway import ScriptedGateway, scripted_gateway
from tests.support.servers import RedisServer


@pytest_asyncio.fixture(loop_scope="module")
async def front(redis_server: RedisServer) -> AsyncIterator[RunningGateway]:
    async with running_gateway(redis=RedisConfig(url=redis_server.url)) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def scripted() -> AsyncIterator[ScriptedGateway]:
    async with scripted_gateway() as made:
        yield made


@pytest_asyncio.fixture(loop_scope="module")
async def window(front: RunningGateway, browser: Browser) -> AsyncIterator[Watched]:
    async with watched(browser, front.url) as made:
        yield made


@pytest_asyncio.fixture(loop_scope="module")
async def page(window: Watched) -> Page:
    opened = await window.open()
    await ready(opened)
    return opened

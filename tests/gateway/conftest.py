"""A gateway over the in-memory bus for each test."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest

from tests.support.running_gateway import RunningGateway, running_gateway


@pytest.fixture
async def front() -> AsyncIterator[RunningGateway]:
    async with running_gateway() as running:
        yield running


@pytest.fixture
async def http(front: RunningGateway) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=front.url, timeout=10) as client:
        yield client

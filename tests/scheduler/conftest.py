"""A scheduler in virtual time for every test that asks."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.scheduler.world import World


@pytest.fixture
async def world() -> AsyncIterator[World]:
    made = World()
    await made.open()
    yield made
    await made.close()

"""A server of tools for each test."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.support.tool_server import ToolServer, tool_server


@pytest.fixture
async def server() -> AsyncIterator[ToolServer]:
    async with tool_server() as running:
        yield running

"""One system for the tests of this folder; each test leaves it whole."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator

import httpx
import pytest

from bus import nats as nats_bus
from bus.api import Bus
from schemas.config import NatsConfig
from tests.e2e.weather import weather_tools
from tests.support.system import System


@pytest.fixture(scope="session")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    folder = tmp_path_factory.mktemp("system")
    tools, settings = folder / "tools.yaml", folder / "settings.yaml"
    settings.write_text(json.dumps({"gateway": {"tools": str(tools)}}))
    arguments = ("--port", "18000", "--config", str(settings))
    with weather_tools() as catalogue:
        tools.write_text(catalogue)
        running = System(folder, arguments=arguments).start()
        yield running
        assert running.stop() == 0


@pytest.fixture
async def http(system: System) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=system.http, timeout=60.0) as client:
        yield client


@pytest.fixture
async def bus(system: System) -> AsyncIterator[Bus]:
    connected = await nats_bus.connect(NatsConfig(url=system.endpoints["nats"]), "e2e")
    yield connected
    await connected.close()

"""A system with two gateways and two schedulers for the tests of this folder, which kill them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator

import httpx
import pytest

from tests.e2e.gateways.names import GATEWAYS
from tests.e2e.weather import weather_tools
from tests.support.system import System
from tests.support.waiting import eventually


@pytest.fixture(scope="package")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    folder = tmp_path_factory.mktemp("gateways")
    tools, settings = folder / "tools.yaml", folder / "settings.yaml"
    # Little time to drain, so that answers are cut and have to go on elsewhere.
    gateway = {"drain_timeout_s": 0.2, "tools": str(tools)}
    settings.write_text(json.dumps({"gateway": gateway}))
    replicas = ("--gateways", "2", "--schedulers", "2")
    arguments = ("--port", "0", *replicas, "--config", str(settings))
    with weather_tools() as catalogue:
        tools.write_text(catalogue)
        running = System(folder / "data", arguments=arguments).start()
        yield running
        assert running.stop() == 0


@pytest.fixture(autouse=True)
async def both_come_back(pair: System) -> AsyncIterator[None]:
    """Wait after each test until both gateways serve."""
    yield
    for gateway in GATEWAYS:
        await _serves(pair, gateway)


async def _serves(system: System, gateway: str) -> None:
    """Wait until the gateway of this name answers again: each connection reaches either one."""

    async def answers() -> bool:
        try:
            async with httpx.AsyncClient(base_url=system.http) as http:
                health = (await http.get("/healthz")).json()
        except httpx.TransportError:
            return False
        return bool(health["gateway_id"] == gateway)

    await eventually(answers, timeout_s=30.0, what=f"{gateway} in its next life")

"""System shared by the tests of this folder; each test leaves it intact."""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncIterator, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest

from millrace.bus import nats as nats_bus
from millrace.bus.api import Bus
from millrace.schemas.config import NatsConfig
from tests.e2e.weather import weather_tools
from tests.support.system import System


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@pytest.fixture(scope="package")
def examples() -> Iterator[str]:
    """The origin at which the documents' examples are served."""
    handler = partial(_Quiet, directory="docs/examples")
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="package")
def system(tmp_path_factory: pytest.TempPathFactory, examples: str) -> Iterator[System]:
    """Run the shared system until the last test of this folder. Idle, it takes 5 % of a core."""
    folder = tmp_path_factory.mktemp("system")
    tools, settings = folder / "tools.yaml", folder / "settings.yaml"
    gateway = {"tools": str(tools), "allowed_origins": [examples]}
    settings.write_text(json.dumps({"gateway": gateway}))
    arguments = ("--port", "0", "--config", str(settings))
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

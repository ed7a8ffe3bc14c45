"""Connections that are gone leave nothing for the garbage collector, which comes rarely."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator, Iterator

import httpx
import pytest
import websockets
from websockets.server import ServerProtocol

from millrace.gateway.server import _HttpProtocol
from millrace.schemas.websocket import SUBPROTOCOL
from tests.support.running_gateway import MODEL, RunningGateway, running_gateway
from tests.support.waiting import eventually

pytestmark = pytest.mark.usefixtures("_collector_off")


@pytest.fixture
def _collector_off() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
async def front() -> AsyncIterator[RunningGateway]:
    async with running_gateway() as running:
        yield running


def num_protocols() -> int:
    kinds = (_HttpProtocol, ServerProtocol)
    return sum(type(one) in kinds for one in gc.get_objects())


async def test_closed_connections_leave_no_objects(front: RunningGateway) -> None:
    before = num_protocols()
    for _ in range(5):
        async with httpx.AsyncClient(base_url=front.url) as client:
            assert (await client.get("/healthz")).status_code == 200
            body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "stream": True}
            async with client.stream("POST", "/v1/chat/completions", json=body) as response:
                async for _line in response.aiter_lines():
                    break
    for _ in range(5):
        async with websockets.connect(front.ws_url, subprotocols=[SUBPROTOCOL]):  # type: ignore[list-item]
            pass
    await eventually(lambda: num_protocols() <= before)

"""Answers of killed gateways: cancelled after the grace, unless their clients return."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from decimal import Decimal
from typing import Any

import httpx
import pytest

from tests.e2e.clients import chat_body
from tests.e2e.gateways.names import GATEWAYS
from tests.support.repository import ROOT
from tests.support.system import System
from tests.support.waiting import eventually

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(300),
    pytest.mark.slow(reason="it starts a whole system; the parts have fast tests"),
]

GRACE_S = 12.0
NUM_TOKENS = 500  # 25 s at 50 ms a step
_PRICES = {
    "version": "2026-11",
    "input_per_million": "100",
    "cached_input_per_million": "50",
    "output_per_million": "400",
}


@pytest.fixture(scope="module")
def slow_system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    folder = tmp_path_factory.mktemp("orphans")
    settings = folder / "settings.yaml"
    engine = {"simulation": {"step_ms": 50.0}}
    sections = {"gateway": {"orphan_grace_s": GRACE_S}, "worker": {"engine": engine}}
    settings.write_text(json.dumps(sections))
    arguments = ["--port", "0", "--engine", "simulated", "--config", str(settings)]
    catalogue = folder / "models.yaml"
    demo = {"source": str(ROOT / "registry" / "demo" / "model"), "prices": _PRICES}
    catalogue.write_text(json.dumps({"models": {"demo": demo}}))
    arguments += ["--catalogue", str(catalogue), "--model", "demo"]
    running = System(folder / "data", arguments=(*arguments, "--gateways", "2")).start()
    yield running
    assert running.stop() == 0


class _Reader:
    """Reader of one answer as server-sent events, over several connections."""

    def __init__(self, system: System, **fields: Any) -> None:
        self.request_id = ""
        self.text = ""
        self.error: dict[str, Any] = {}
        self.is_over = False
        self._system = system
        self._last_id = ""
        self._body = chat_body("What is TTFT?", stream=True, max_tokens=NUM_TOKENS, **fields)

    async def read(self) -> None:
        """Read to the end, from the last received event on."""
        event_id, text = "", ""
        async with self._lines() as lines:
            async for name, value in lines:
                if name == "id":
                    event_id = value
                elif value == "[DONE]":
                    self.is_over = True
                elif name == "data":
                    chunk = json.loads(value)
                    self.error = chunk.get("error", {})
                    for choice in chunk.get("choices", ()):
                        text += choice["delta"].get("content") or ""
                elif not name:  # the event is complete
                    self.text += text
                    self._last_id, text = event_id or self._last_id, ""

    @asynccontextmanager
    async def _lines(self) -> AsyncIterator[AsyncIterator[tuple[str, str]]]:
        headers = {"Accept": "text/event-stream"}
        if self._last_id:
            headers["Last-Event-ID"] = self._last_id
        async with (
            httpx.AsyncClient(base_url=self._system.http, timeout=30.0) as http,
            http.stream(
                "POST", "/v1/chat/completions", json=self._body, headers=headers
            ) as response,
        ):
            assert response.status_code == 200, (await response.aread()).decode()
            self.request_id = response.headers["x-request-id"]

            async def lines() -> AsyncIterator[tuple[str, str]]:
                async for line in response.aiter_lines():
                    name, _, value = line.partition(": ")
                    yield name, value

            yield lines()


async def _kill_gateways_under(system: System, reader: _Reader) -> None:
    """Read some of an answer, and kill its gateway while it is being read."""
    reading = asyncio.create_task(reader.read())
    await eventually(lambda: len(reader.text) > 20, timeout_s=30.0)
    for gateway in GATEWAYS:
        system.kill(gateway)
    with pytest.raises(httpx.TransportError):
        await reading


async def _are_back(system: System) -> None:
    async def answers() -> bool:
        try:
            async with httpx.AsyncClient(base_url=system.http) as http:
                return (await http.get("/healthz")).status_code == 200
        except httpx.TransportError:
            return False

    await eventually(answers, timeout_s=30.0)


def _rows(system: System, request_id: str) -> list[dict[str, Any]]:
    return system.sql(
        "SELECT status, error_code, completion_tokens, total_ms FROM requests FINAL "
        f"WHERE request_id = '{request_id}'"
    )


async def _spent(system: System) -> Decimal:
    """Return the spend that the counter of the tenant's budget shows."""
    async with httpx.AsyncClient(base_url=system.http) as http:
        (account,) = (await http.get("/v1/limits")).json()["accounts"]
    return Decimal(account["spent"].get("USD", 0))


def _cost_of_rows(system: System) -> Decimal:
    (row,) = system.sql(
        "SELECT toString(sum(t.cost)) AS paid FROM requests AS t FINAL WHERE tenant = 'local'"
    )
    return Decimal(row["paid"])


async def test_an_orphaned_answer_ends_after_the_grace(slow_system: System) -> None:
    system, reader = slow_system, _Reader(slow_system)
    began_s = time.monotonic()
    await _kill_gateways_under(system, reader)
    killed_after_s = time.monotonic() - began_s
    await eventually(lambda: bool(_rows(system, reader.request_id)), timeout_s=60.0)
    (row,) = _rows(system, reader.request_id)
    assert (row["status"], row["error_code"]) == ("cancelled", "orphaned")
    assert 0 < int(row["completion_tokens"]) < NUM_TOKENS
    assert GRACE_S / 2 < float(row["total_ms"]) / 1e3 < killed_after_s + GRACE_S + 8.0
    await _are_back(system)
    assert await _spent(system) == _cost_of_rows(system) > 0
    # The client comes back all the same.
    async with asyncio.timeout(20.0):
        await reader.read()
    assert reader.error["code"] == "orphaned"
    assert await _spent(system) == _cost_of_rows(system)


async def test_a_client_that_comes_back_in_time_gets_every_token(slow_system: System) -> None:
    system = slow_system
    await _are_back(system)
    undisturbed, disturbed = _Reader(system, seed=5), _Reader(system, seed=5)
    await undisturbed.read()
    await _kill_gateways_under(system, disturbed)
    await _are_back(system)
    await disturbed.read()
    assert (disturbed.error, disturbed.is_over) == ({}, True)
    assert disturbed.text == undisturbed.text
    await eventually(lambda: bool(_rows(system, disturbed.request_id)), timeout_s=20.0)
    (row,) = _rows(system, disturbed.request_id)
    assert (row["status"], int(row["completion_tokens"])) == ("done", NUM_TOKENS)

    async def is_charged_once() -> bool:
        return await _spent(system) == _cost_of_rows(system)

    await eventually(is_charged_once, timeout_s=20.0)

"""Metrics of a running system: Prometheus finds every part, with correct figures."""

from __future__ import annotations

import json

import httpx
import pytest

from tests.e2e.clients import ask_sse
from tests.support.scraped import Scraped
from tests.support.system import System
from tests.support.waiting import eventually

pytestmark = pytest.mark.e2e


def _targets(system: System) -> dict[str, tuple[str, str]]:
    """Part and address by name, as Prometheus reads them."""
    entries = json.loads((system.data / "run" / "metrics-targets.json").read_text())
    return {
        entry["labels"]["name"]: (entry["labels"]["part"], entry["targets"][0]) for entry in entries
    }


async def _scrape(http: httpx.AsyncClient, address: str) -> Scraped:
    scraped = Scraped((await http.get(f"http://{address}/metrics")).text)
    scraped.check()
    return scraped


async def test_every_part_is_found_and_well(system: System, http: httpx.AsyncClient) -> None:
    await ask_sse(http, "What is TTFT?")
    targets = _targets(system)
    parts = {part for part, _ in targets.values()}
    assert parts == {"gateway", "scheduler", "worker", "telemetry"}
    for name, (part, address) in targets.items():
        health = await http.get(f"http://{address}/healthz")
        serving = {"models": ["demo"]} if part in ("gateway", "scheduler") else {}
        assert (health.status_code, health.json()) == (
            200,
            {"status": "ok", "part": part} | serving,
        )
        assert (await _scrape(http, address)).value("millrace_healthy") == 1, name
    _, worker = targets["worker-1"]
    at = {"model": "demo", "worker": "worker-1"}
    made = (await _scrape(http, worker)).value("millrace_engine_decode_tokens_total", **at)
    assert made > 0
    _, telemetry = targets["telemetry-1"]

    async def stored() -> bool:
        scraped = await _scrape(http, telemetry)
        return scraped.value("millrace_telemetry_stored_records_total") > 0

    await eventually(stored, 20.0)


async def test_a_part_that_starts_again_is_found_where_it_was(
    system: System, http: httpx.AsyncClient
) -> None:
    before = _targets(system)
    killed = system.kill("telemetry-1")
    _, address = before["telemetry-1"]

    async def is_well_again() -> bool:
        try:
            health = await http.get(f"http://{address}/healthz")
        except httpx.TransportError:
            return False
        return health.status_code == 200 and system.pid("telemetry-1") != killed

    await eventually(is_well_again, 30.0)
    assert _targets(system) == before

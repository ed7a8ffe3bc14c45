"""A request that is refused is a row in the store, on the page and in what a tenant used."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
import uuid

import httpx
import pytest
from playwright.async_api import expect
from websockets.asyncio.client import connect

from tests.support.chromium import chromium
from tests.support.system import System
from tests.support.waiting import eventually
from tests.telemetry.ops_page import shoot

pytestmark = pytest.mark.e2e

CHAT = {"model": "demo", "messages": [{"role": "user", "content": "words of mine"}]}


def _cli(system: System, *arguments: str) -> str:
    finished = subprocess.run(
        [sys.executable, "-m", "millrace.cli", *arguments, "--data", str(system.data)],
        capture_output=True,
        text=True,
        timeout=60.0,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


async def _refused_by_websocket(system: System, token: str) -> None:
    headers = {"authorization": f"Bearer {token}"}
    async with connect(system.websocket, additional_headers=headers) as socket:
        await socket.send(json.dumps({"type": "generate", "id": "a", **CHAT, "model": "absent"}))
        async with asyncio.timeout(30.0):
            assert json.loads(await socket.recv())["code"] == "model_not_found"


@pytest.mark.browser
async def test_refusals_by_http_and_websocket_are_rows(
    system: System, http: httpx.AsyncClient
) -> None:
    tenant = f"tenant-{uuid.uuid4().hex[:8]}"
    create = ("keys", "create", "--tenant", tenant, "--context-tokens", "10", "--json")
    made = json.loads(_cli(system, *create))
    headers = {"authorization": f"Bearer {made['key']}"}
    chat = "/v1/chat/completions"
    too_long = {**CHAT, "max_tokens": 100}
    for _ in range(3):
        assert (await http.post(chat, json=too_long, headers=headers)).status_code == 400
    assert (await http.post("/v1/embeddings", content=b"{", headers=headers)).status_code == 400
    await _refused_by_websocket(system, made["key"])
    wanted = [
        ("/v1/chat/completions", 400, "context_length_exceeded", "context_tokens", 3),
        ("/v1/embeddings", 400, "invalid_json", "", 1),
        ("/v1/ws", 404, "model_not_found", "", 1),
    ]
    query = (
        "SELECT door, status, code, limit_reached, toUInt32(sum(requests)) AS n "
        f"FROM refusals FINAL WHERE tenant = '{tenant}' AND api_key = '{made['key_id']}' "
        "GROUP BY ALL ORDER BY door"
    )

    def stored() -> bool:
        return [tuple(row.values()) for row in system.sql(query)] == wanted

    await eventually(stored, 60.0, "rows of refusals")
    # They were never jobs.
    jobs = f"SELECT count() AS n FROM requests FINAL WHERE tenant = '{tenant}'"
    assert int(system.sql(jobs)[0]["n"]) == 0
    begin = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime((time.time() // 60 - 15) * 60))
    usage = _cli(system, "usage", "--from", begin, "--tenant", tenant, "--format", "json")
    found = {(row["door"], row["refused"]) for row in json.loads(usage)["refusals"]}
    assert found == {(door, count) for door, _, _, _, count in wanted}
    metrics = (await http.get("/metrics")).text
    assert 'route="/v1/ws",status="404"' in metrics
    await _seen_on_the_page(system, tenant)


async def _seen_on_the_page(system: System, tenant: str) -> None:
    async with chromium() as browser:
        page = await browser.new_page(viewport={"width": 1440, "height": 1250})
        await page.goto(f"{system.http}/ops/#range=15m&tenant={tenant}")
        rows = page.locator("#refusals tbody tr")
        await expect(rows).to_have_count(3, timeout=30_000)
        await expect(rows.first).to_contain_text("context_tokens")
        await page.locator("#refusals").scroll_into_view_if_needed()
        await shoot(page, "ops-refusals-of-a-tenant")

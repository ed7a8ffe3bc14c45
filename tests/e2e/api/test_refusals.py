"""Refused requests: rows in the store, on the page and in the tenant's usage.

A request refused by the engine costs nothing.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
import uuid
from typing import Any

import httpx
import pytest
from playwright.async_api import expect
from websockets.asyncio.client import connect

from millrace.bus.api import Bus
from millrace.schemas.jobs import ChatMessage, Job
from millrace.schemas.sampling import Grammar, GrammarKind, SamplingParams
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


# Each compiles as JSON, and is no grammar.
BAD_PATTERN = {
    "type": "object",
    "properties": {"a": {"type": "string", "pattern": "("}},
    "required": ["a"],
}
BAD_TOOL = {"name": "f", "parameters": BAD_PATTERN, "strict": True}


async def test_requests_that_the_engine_refuses_cost_nothing(
    system: System, http: httpx.AsyncClient, bus: Bus
) -> None:
    tenant = f"tenant-{uuid.uuid4().hex[:8]}"
    made = json.loads(_cli(system, "keys", "create", "--tenant", tenant, "--json"))
    headers = {"authorization": f"Bearer {made['key']}"}
    tools = [{"type": "function", "function": BAD_TOOL}]
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("chat/completions", CHAT | {"guided_regex": "(a", "n": 2}),
        ("chat/completions", CHAT | {"guided_grammar": "start: b", "stream": True}),
        ("chat/completions", CHAT | {"tools": tools, "tool_choice": "required"}),
        ("completions", {"model": "demo", "prompt": "words", "guided_json": {"$ref": "#/a"}}),
        ("responses", {"model": "demo", "input": "words", "guided_regex": "(?=a)b"}),
    ]
    for path, body in bodies:
        answer = await http.post(f"/v1/{path}", json=body, headers=headers)
        assert "grammar_invalid" in answer.text, answer.text
    grammar = Grammar(kind=GrammarKind.REGEX, text="[")
    await bus.jobs.publish(
        Job(
            request_id=f"job-{uuid.uuid4().hex}",
            model="demo",
            tenant=tenant,
            messages=(ChatMessage(role="user", content="words"),),
            sampling=SamplingParams(max_tokens=4, grammar=grammar),
        )
    )
    good = await http.post("/v1/chat/completions", json=CHAT | {"max_tokens": 2}, headers=headers)
    assert good.status_code == 200
    columns = "status, error_code, price_version, toFloat64(cost) > 0 AS is_paid"
    query = f"SELECT {columns} FROM requests_once WHERE tenant = '{tenant}'"

    def are_stored() -> bool:
        return len(system.sql(query)) == len(bodies) + 2

    await eventually(are_stored, 60.0, "a row for each request")
    rows = [tuple(row.values()) for row in system.sql(query)]
    refused = [row for row in rows if row[0] == "failed"]
    assert set(refused) == {("failed", "grammar_invalid", "", False)}
    (paid,) = [row for row in rows if row[0] == "done"]
    assert paid[3]
    invoice = ("usage", "--tenant", tenant, "--from", "2026-01-01", "--invoice")
    minutes = f"SELECT requests FROM usage_by_minute FINAL WHERE tenant = '{tenant}' AND cost > 0"
    await eventually(lambda: bool(system.sql(minutes)), 60.0, "the usage of that minute")
    (invoiced,) = json.loads(_cli(system, *invoice, "--format", "json"))["rows"]
    assert (invoiced["requests"], float(invoiced["difference"])) == (1, 0.0)
    limits = (await http.get("/v1/limits", headers=headers)).json()
    spent = {float(account["spent"]["USD"]) for account in limits["accounts"]}
    # To the billionth, rounded up.
    assert all(0 <= one - float(invoiced["amount"]) < 2e-9 for one in spent)


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

"""Prompts and answers appear in no log, metric or table."""

from __future__ import annotations

import uuid

import httpx
import pytest

from millrace.bus.api import Bus
from tests.e2e.clients import ask_nats, ask_sse, ask_websocket
from tests.support.system import System
from tests.support.waiting import eventually

pytestmark = pytest.mark.e2e


def _rows_with(system: System, table: str, word: str) -> int:
    """Count the table's rows in which a column contains the word."""
    sql = f"SELECT count() AS n FROM {table} WHERE position(toString(tuple(*)), '{word}') > 0"
    return int(system.sql(sql)[0]["n"])


async def test_no_word_of_a_request_is_in_a_log_a_metric_or_a_table(
    system: System, http: httpx.AsyncClient, bus: Bus
) -> None:
    marker = f"zq{uuid.uuid4().hex}"
    question = f"What is TTFT, {marker}?"
    answers = [
        await ask_sse(http, question, seed=7),
        await ask_websocket(system.websocket, question),
        await ask_nats(bus, f"private-{marker[:10]}", question),
    ]
    # Refused, too: an error names what is wrong, not what was said.
    refused = await http.post("/v1/chat/completions", json={"model": "demo", "messages": marker})
    assert refused.status_code == 400
    ids = ", ".join(f"'{answer.request_id}'" for answer in answers)
    rows = f"SELECT * FROM requests FINAL WHERE request_id IN ({ids})"
    await eventually(lambda: len(system.sql(rows)) == len(answers), what="rows")
    tables = [
        row["name"]
        for row in system.sql("SELECT name FROM system.tables WHERE database='millrace'")
    ]
    assert {"requests", "deliveries", "transcripts"} <= set(tables)
    assert _rows_with(system, "requests", answers[0].request_id) == 1
    assert [table for table in tables if _rows_with(system, table, marker)] == []
    logs = list((system.data / "logs").glob("*.log"))
    assert logs
    for log in logs:
        assert marker not in log.read_text(), log.name
    assert marker not in (await http.get("/metrics")).text

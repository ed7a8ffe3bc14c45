"""The SQL of every panel of Grafana's boards, run on the real engine."""

from __future__ import annotations

import json
import time
from typing import Any

import msgspec

from millrace.runtime.clock import SystemClock
from millrace.schemas.records import Attempt, RequestRecord, Status
from millrace.telemetry.rollups.rollups import Rollups
from millrace.telemetry.store.store import Store
from millrace.telemetry.store.tables import DELIVERIES, REQUESTS, WORKER_SAMPLES
from tests.deploy.grafana import BOARDS, interpolated, read_board, targets
from tests.telemetry.records import delivery_record, request_record, worker_sample

_PANELS = list(targets("grafana-clickhouse-datasource"))


async def _fill(store: Store) -> tuple[int, int]:
    """Store ten minutes of past traffic, and return its begin and end in Unix seconds."""
    end_s = int(time.time()) // 60 * 60 - 120
    begin_s = end_s - 600
    at_ns = [(begin_s + 1 + 9 * n) * 10**9 for n in range(60)]
    requests = [_request(n, done_ns) for n, done_ns in enumerate(at_ns)]
    deliveries = [delivery_record(n, done_ns=done_ns) for n, done_ns in enumerate(at_ns)]
    samples = [worker_sample(n, sampled_ns=each_ns) for n, each_ns in enumerate(at_ns[:-1])]
    samples.append(worker_sample(59, sampled_ns=time.time_ns()))
    sequences = range(60)
    await store.insert(REQUESTS, REQUESTS.to_columns(requests, sequences), "requests")
    await store.insert(DELIVERIES, DELIVERIES.to_columns(deliveries, sequences), "deliveries")
    await store.insert(WORKER_SAMPLES, WORKER_SAMPLES.to_columns(samples, sequences), "samples")
    await Rollups(store, SystemClock(), 1.0).reconcile()
    return begin_s, end_s


def _request(number: int, done_ns: int) -> RequestRecord:
    """Make a request; one in ten failed after a move to another worker."""
    record = request_record(number, done_ns=done_ns)
    if number % 10:
        return record
    life = Attempt(epoch=1, worker_id="w-9", started_ns=done_ns - 10**9, ended_ns=done_ns)
    return msgspec.structs.replace(
        record, status=Status.FAILED, error_code="engine_failed", attempts=(life,)
    )


async def _rows(store: Store, sql: str) -> tuple[dict[str, str], list[dict[str, Any]]]:
    """The types of the columns, and the rows."""
    answer = json.loads(await store.reader.read(sql, {}, "JSON"))
    return {column["name"]: column["type"] for column in answer["meta"]}, answer["data"]


async def test_every_panel_has_its_columns_and_rows(store: Store) -> None:
    begin_s, end_s = await _fill(store)
    for name, panel, target in _PANELS:
        sql = interpolated(target["rawSql"], begin_s, end_s)
        columns, rows = await _rows(store, sql)
        if target["queryType"] == "timeseries":
            assert columns["time"].startswith("DateTime"), name
            figures = [
                kind
                for column, kind in columns.items()
                if column != "time"
                and kind.removeprefix("Nullable(").startswith(("UInt", "Int", "Float"))
            ]
            labels = [kind for kind in columns.values() if kind == "String"]
            # Anything else would be neither a line nor what a line is told by.
            assert len(figures) + len(labels) + 1 == len(columns), (name, columns)
            assert figures, name
            times = [row["time"] for row in rows]
            assert times == sorted(times), name
        elif panel["type"] == "stat":
            assert list(columns) == ["value"], name
            assert len(rows) == 1, name
        assert rows, name


async def test_every_panel_answers_over_nothing_at_its_shortest_step(store: Store) -> None:
    now_s = int(time.time())
    for _, panel, target in _PANELS:
        step_s = {"10s": 10, "1m": 60}[panel.get("interval", "1m")]
        await _rows(store, interpolated(target["rawSql"], now_s - 1_800, now_s, step_s=step_s))


async def test_a_filter_filters_and_quotes(store: Store) -> None:
    begin_s, end_s = await _fill(store)
    by_title = {panel["title"]: target["rawSql"] for _, panel, target in _PANELS}
    sql = by_title["Requests"]
    _, everybody = await _rows(store, interpolated(sql, begin_s, end_s))
    tenant = request_record(1).tenant
    _, one = await _rows(store, interpolated(sql, begin_s, end_s, tenant=tenant))
    _, nobody = await _rows(store, interpolated(sql, begin_s, end_s, tenant="it's nobody"))
    counts = [int(rows[0]["value"]) for rows in (everybody, one, nobody)]
    assert counts[0] == 60
    assert 0 < counts[1] < 60
    assert counts[2] == 0


async def test_the_filters_offer_what_there_is(store: Store) -> None:
    begin_s, end_s = await _fill(store)
    offered: dict[str, list[str]] = {}
    for board in map(read_board, BOARDS):
        for variable in board["templating"]["list"]:
            if variable["type"] == "query":
                sql = interpolated(variable["query"]["rawSql"], begin_s, end_s)
                _, rows = await _rows(store, sql)
                offered[variable["name"]] = sorted(row["name"] for row in rows)
    records = [request_record(n) for n in range(60)]
    assert offered == {
        "tenant": sorted({record.tenant for record in records}),
        "model": sorted({record.model_served or record.model_requested for record in records}),
    }

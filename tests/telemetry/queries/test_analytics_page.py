"""Facts and statements in docs/analytics.md and docs/analytics-tools.md hold."""

from __future__ import annotations

import re
import time
from decimal import Decimal

import msgspec
import pytest

from millrace.schemas.control import TelemetryQuery
from millrace.telemetry.http.answers import SavedQueryAnswers, load_queries
from millrace.telemetry.rollups.budgets import TABLE as BUDGETS
from millrace.telemetry.store.store import Store
from millrace.telemetry.store.tables import REFUSALS, REQUESTS
from millrace.telemetry.store.tables_page import MARKDOWN, ROWS, as_json, as_markdown, described
from millrace.telemetry.store.view_statements import changes_views
from tests.support.repository import ROOT
from tests.telemetry.answered import rows_of
from tests.telemetry.books import FIRST_S, REQUEST_ROWS, fill
from tests.telemetry.records import refusal_record, request_record

PAGE = "\n".join(
    (ROOT / "docs" / name).read_text(encoding="utf-8")
    for name in ("analytics.md", "analytics-tools.md")
)
_INTERNAL = {"outbox_ledger", "schema_migrations"}


async def test_tables_are_kept_for_as_long_as_it_says(store: Store) -> None:
    documented = {
        name: int(days.replace(",", "")) if days else None
        for name, days in re.findall(
            r"^\| `(\w+)` \|.*\| (?:([\d,]+) days|for ever) \|$", PAGE, re.MULTILINE
        )
    }
    rows = await store.rows(
        "SELECT name, extract(create_table_query, 'TTL .*toIntervalDay\\\\((\\\\d+)\\\\)') "
        "FROM system.tables WHERE database = currentDatabase() AND engine != 'View'"
    )
    actual = {
        str(name): int(days) if days else None for name, days in rows if name not in _INTERNAL
    }
    # The view of both has the rows of both for as long.
    assert actual["generation_rows"] == actual["requests"]
    assert actual == documented


async def test_its_statements_run(store: Store) -> None:
    await fill(store)
    now_ns = time.time_ns()
    calling = msgspec.structs.replace(
        request_record(1, done_ns=now_ns), called_tools=("look",), num_tool_calls=1
    )
    await store.insert(REQUESTS, REQUESTS.to_columns([calling], [1]), "calling")
    refused = REFUSALS.to_columns([refusal_record(now_ns, limit="requests_per_minute")], [1])
    await store.insert(REFUSALS, refused, "refused")
    await store.insert(BUDGETS, (["acme"], [""], ["USD"], [Decimal(100)], [0]), "budget")
    statements = re.findall(r"```sql\n(.*?)```", PAGE, re.DOTALL)
    assert statements
    for statement in statements:
        if "{{" in statement:
            continue  # a model of dbt, which the test of it builds
        if changes_views(statement):
            assert store.views is not None
            await store.views.run(statement, None)
            continue
        wider = statement.replace("INTERVAL 1 DAY", "INTERVAL 4 DAY")
        assert await store.reader.read(wider, {}, "TSV")
    await store.command("DROP VIEW analysts.slow")


_EPOCHS = ((10**9, 4 * 10**9), (10**12, 4 * 10**12), (10**15, 4 * 10**15))
# What pages go on behind, and since when a condition holds: for the program that asks.
_FOR_PROGRAMS = {("requests_page", "done_us"), ("alert_conditions", "since_s")}


async def test_saved_queries_tell_times_as_such(store: Store) -> None:
    await fill(store)
    now_ns = time.time_ns()
    refused = REFUSALS.to_columns([refusal_record(now_ns, 0, tenant="acme")], [1])
    await store.insert(REFUSALS, refused, "refused")
    answers = SavedQueryAnswers(store.reader)
    given: dict[str, str | int | float]
    given = {"id": REQUEST_ROWS[0].request_id, "from_s": FIRST_S, "to_s": 0, "step_s": 3600}
    num_rows = 0
    for name, query in load_queries().items():
        params = {one: given[one] for one in query.parameters if one in given}
        answer = await answers.answer(TelemetryQuery(name=name, params={**params}))
        assert not answer.error, (name, answer.error)
        for row in rows_of(answer):
            num_rows += 1
            for column, value in row.items():
                if (name, column) in _FOR_PROGRAMS:
                    continue
                is_number = isinstance(value, int | float) and not column.endswith("_tokens")
                seems_time = is_number and any(low < value < high for low, high in _EPOCHS)
                assert not seems_time, (name, column, value)
    assert num_rows > 50


async def test_the_page_of_tables_is_of_today(store: Store) -> None:
    """Made by ``python -m millrace.telemetry.store.tables_page``."""
    rows = await described(store)
    assert (ROOT / MARKDOWN).read_text(encoding="utf-8") == as_markdown(rows)
    assert (ROOT / ROWS).read_text(encoding="utf-8") == as_json(rows)


@pytest.mark.parametrize("name", ["usage_by_minute", "usage_by_minute_once"])
async def test_the_tables_are_asked_for_by_either_name(store: Store, name: str) -> None:
    query = TelemetryQuery(name="tables", params={"table": name})
    rows = rows_of(await SavedQueryAnswers(store.reader).answer(query))
    assert {row["table"] for row in rows} == {"usage_by_minute", "usage_by_minute_once"}
    assert {"ttft_ms", "ttft_p95_ms", "cost"} <= {row["column"] for row in rows}
    assert "fingerprint" not in {row["column"] for row in rows}


def test_each_saved_query_has_a_test_of_its_own() -> None:
    """A test asks it by its name and knows the answer."""
    files = [
        *(ROOT / "tests" / "telemetry").rglob("test_*.py"),
        *(ROOT / "tests" / "cli").rglob("test_*.py"),
    ]
    text = "\n".join(file.read_text(encoding="utf-8") for file in files)
    assert not [name for name in load_queries() if not re.search(rf'["/]{name}"', text)]

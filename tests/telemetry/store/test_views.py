"""The comments and views of a store are those of the declaration, in every store."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from millrace.schemas.chat.asked import Api
from millrace.schemas.config import ClickHouseConfig
from millrace.schemas.frames import FinishReason
from millrace.schemas.records import ClientEnd, Status
from millrace.telemetry.store.declaration import (
    INTERNAL,
    load_declaration,
    load_joint_views,
    load_values,
)
from millrace.telemetry.store.migrate import migrate
from millrace.telemetry.store.store import Store
from millrace.telemetry.store.tables import REFUSALS, REQUESTS
from millrace.telemetry.store.views import STATE, Changes, Existing
from tests.telemetry.books import fill
from tests.telemetry.records import refusal_record, request_record

_COLUMNS = "SELECT table, name, comment FROM system.columns WHERE database = currentDatabase()"
_STATEMENTS = """
SELECT name, create_table_query FROM system.tables WHERE database = currentDatabase() ORDER BY name
"""


@pytest.fixture
async def spoiled(store_path: Path) -> AsyncIterator[Store]:
    """A migrated database that a test may change."""
    opened = await Store.open(ClickHouseConfig(path=str(store_path), database="older"))
    await migrate(opened)
    yield opened
    await opened.command("DROP DATABASE older")
    await opened.close()


async def test_the_declaration_has_the_columns_of_the_tables(store: Store) -> None:
    """A column that is added to a table needs a line in ``telemetry/columns/<table>.toml``."""
    declared = load_declaration()
    views = {table.view for table in declared.values() if table.view} | load_joint_views().keys()
    existing = Existing.of(await store.rows(STATE))
    assert existing.keys() - views == declared.keys()
    for name, table in declared.items():
        assert set(existing[name].columns) == set(table.columns), name


async def test_every_table_and_column_says_what_it_is(store: Store) -> None:
    for table, column, comment in await store.rows(_COLUMNS):
        assert comment, (table, column)
        if str(table).endswith("_once"):
            assert not str(comment).startswith(INTERNAL), (table, column)
    assert (
        await store.rows(
            "SELECT name FROM system.tables WHERE database = currentDatabase() AND comment = ''"
        )
        == []
    )


async def test_what_differs_is_made_again_and_nothing_else(spoiled: Store) -> None:
    made = await spoiled.rows(_STATEMENTS)
    assert await migrate(spoiled) == []
    for statement in (
        "ALTER TABLE requests COMMENT COLUMN tenant 'It''s another version''s'",
        "ALTER TABLE prices MODIFY COMMENT ''",
        "ALTER TABLE requests_once COMMENT COLUMN user ''",
        "DROP VIEW refusals_once",
        "CREATE OR REPLACE VIEW prices_once AS SELECT * FROM prices",
    ):
        await spoiled.command(statement)
    assert await migrate(spoiled) == [
        "comments of prices, requests",
        "views prices_once, refusals_once, requests_once",
    ]
    assert await spoiled.rows(_STATEMENTS) == made


async def test_a_view_follows_the_type_of_a_column(spoiled: Store) -> None:
    await spoiled.command("ALTER TABLE deliveries MODIFY COLUMN stalled_ms Nullable(Float64)")
    assert await migrate(spoiled) == ["views deliveries_once"]
    [(kind,)] = await spoiled.rows(
        "SELECT type FROM system.columns "
        "WHERE database = currentDatabase() AND table = 'deliveries_once' AND name = 'stalled_ms'"
    )
    assert kind == "Nullable(Float64)"


def test_sets_of_values_are_the_codes_own() -> None:
    values = load_values()
    statuses = {status.value for status in Status}
    assert {name: set(values[name]) for name in ("status", "finish_reason", "api", "outcome")} == {
        "status": statuses,
        "finish_reason": {reason.value for reason in FinishReason},
        "api": {api.value for api in Api if api is not Api.UNKNOWN},
        "outcome": statuses | {end.value for end in ClientEnd},
    }


def test_of_an_empty_store_everything_differs() -> None:
    changes = Changes.of({}, "millrace")
    declared = load_declaration()
    assert changes.comments.keys() == declared.keys()
    views = {table.view for table in declared.values() if table.view}
    assert changes.views.keys() == views | load_joint_views().keys()
    assert all(table.internal for table in declared.values() if not table.view)


async def test_a_view_has_percentiles_in_place_of_states(store: Store) -> None:
    """Tools that preview a view with ``SELECT *`` cannot show a state."""
    await fill(store)
    kinds = await store.rows(
        "SELECT type FROM system.columns WHERE database = currentDatabase() "
        "AND endsWith(table, '_once') AND startsWith(type, 'AggregateFunction')"
    )
    assert kinds == []
    wanted = await store.rows(
        "SELECT toStartOfMinute(done_at) AS minute, tenant, user, any(ttft_ms), any(tpot_ms) "
        "FROM requests_once GROUP BY minute, tenant, user HAVING count() = 1 ORDER BY ALL"
    )
    found = await store.rows(
        "SELECT minute, tenant, user, any(ttft_p50_ms), any(tpot_p99_ms) "
        "FROM usage_by_minute_once GROUP BY minute, tenant, user HAVING sum(requests) = 1 "
        "ORDER BY ALL"
    )
    assert {low is None for *_, low, _ in wanted} == {True, False}
    assert found == wanted


async def test_what_was_answered_429_is_in_one_view(store: Store) -> None:
    shed = {"status": Status.SHED, "model_served": "", "model_requested": "demo"}
    requests = [
        msgspec.structs.replace(request_record(number), error_code=code, **shed)
        for number, code in ((1, "queue_full"), (2, ""))
    ]
    requests.append(msgspec.structs.replace(request_record(3), status=Status.EXPIRED))
    refusals = [
        refusal_record(number=1, tenant="acme", limit="requests_per_minute", count=5),
        refusal_record(number=2, tenant="acme", status=400, code="invalid_json"),
    ]
    await store.insert(REQUESTS, REQUESTS.to_columns(requests, range(3)), "requests")
    await store.insert(REFUSALS, REFUSALS.to_columns(refusals, range(2)), "refusals")
    assert await store.rows(
        "SELECT refused_by, code, limit_reached, model, sum(requests) FROM too_many_requests_once "
        "GROUP BY ALL ORDER BY ALL"
    ) == [
        ("gateway", "requests_per_minute", "requests_per_minute", "", 5),
        ("queue", "overloaded", "", "demo", 1),
        ("queue", "queue_full", "", "demo", 1),
    ]

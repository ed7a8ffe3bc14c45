"""Comments and views of a store: they match the declaration in every store."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterable, Mapping
from pathlib import Path

import msgspec
import pytest

from millrace.registry.rollouts import versions
from millrace.registry.routing.router import (
    ABSENT,
    CONTEXT,
    PINNED,
    PLAIN,
    SATURATED,
    SESSION,
    TIER,
    Cue,
)
from millrace.schemas.chat.asked import Api
from millrace.schemas.config import ClickHouseConfig
from millrace.schemas.engines import CostMethod, WorkerRole
from millrace.schemas.frames import FinishReason
from millrace.schemas.jobs import Source, Tier
from millrace.schemas.records import ClientEnd, LossCause, LossObserver, Status
from millrace.schemas.tenants import LIMITS
from millrace.telemetry.store.declaration import (
    INTERNAL,
    DeclaredTable,
    JointView,
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
    existing = Existing.of(await store.rows(STATE))
    assert existing.keys() - _views() == declared.keys()
    for name, table in declared.items():
        assert set(existing[name].columns) == set(table.columns), name


async def test_every_table_and_column_says_what_it_is(store: Store) -> None:
    for table, column, comment in await store.rows(_COLUMNS):
        assert comment, (table, column)
        if table in _views():
            assert not str(comment).startswith(INTERNAL), (table, column)
    assert (
        await store.rows(
            "SELECT name FROM system.tables WHERE database = currentDatabase() AND comment = ''"
        )
        == []
    )


def _declared() -> Mapping[str, DeclaredTable | JointView]:
    return {**load_declaration(), **load_joint_views()}


def _views() -> set[str]:
    of_tables = {table.view for table in load_declaration().values() if table.view}
    return of_tables | load_joint_views().keys()


_NUMBERS = re.compile(r"(Nullable\()?(U?Int|Float|Decimal)|AggregateFunction")
_TEXTS = ("String", "LowCardinality(String)")
_UNITS = {"ms": "ms", "us": "us", "j": "J", "bytes": "bytes", "tokens": "tokens"}


async def test_a_column_says_its_unit_and_when_it_is_null_or_empty(store: Store) -> None:
    existing = Existing.of(await store.rows(STATE))
    for table, declared in _declared().items():
        for name, (kind, _) in existing[table].columns.items():
            column, where = declared.columns[name], (table, name)
            assert column.what.endswith("."), where
            assert bool(column.unit) == bool(_NUMBERS.match(kind)), where
            assert bool(column.null) == kind.startswith("Nullable"), where
            assert bool(column.empty) == (kind in _TEXTS), where
            suffix = name.rpartition("_")[2]
            assert _UNITS.get(suffix, "") in column.unit, where


def test_the_declared_values_are_those_of_the_code() -> None:
    """A value that the code gains needs its meaning in ``telemetry/columns/values.toml``."""
    reasons = {*Cue, PLAIN, PINNED, SESSION, TIER, CONTEXT, ABSENT, SATURATED, versions.REASON}
    of_code: dict[str, Iterable[str]] = {
        "source": Source,
        "tier": Tier,
        "status": Status,
        "cost_method": CostMethod,
        "role": WorkerRole,
        "limit": LIMITS,
        "route_reason": reasons,
        "finish_reason": FinishReason,
        "api": [api for api in Api if api is not Api.UNKNOWN],
        "outcome": [*Status, *ClientEnd],
        "loss_cause": LossCause,
        "loss_observer": LossObserver,
        "refused_by": ("gateway", "queue"),
    }
    assert {name: set(values) for name, values in load_values().items()} == {
        name: set(map(str, values)) for name, values in of_code.items()
    }
    columns = [column for one in _declared().values() for column in one.columns.values()]
    assert {column.values for column in columns if column.values} == of_code.keys()


async def test_only_views_that_differ_are_made_again(spoiled: Store) -> None:
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


def test_every_view_of_an_empty_store_differs() -> None:
    changes = Changes.of({}, "millrace")
    declared = load_declaration()
    assert changes.comments.keys() == declared.keys()
    assert changes.views.keys() == _views()
    assert all(table.internal for table in declared.values() if not table.view)


async def test_a_view_has_percentiles_in_place_of_states(store: Store) -> None:
    """Tools that preview a view with ``SELECT *`` cannot show a state."""
    await fill(store)
    existing = Existing.of(await store.rows(STATE))
    for view in _views():
        kinds = [kind for kind, _ in existing[view].columns.values()]
        assert not any(kind.startswith("AggregateFunction") for kind in kinds), view
        await store.rows(f"SELECT * FROM {view} LIMIT 100")
        for form in ("JSONEachRow", "Parquet", "RowBinaryWithNamesAndTypes"):
            await store.reader.read(f"SELECT * FROM {view} LIMIT 100", {}, form)
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

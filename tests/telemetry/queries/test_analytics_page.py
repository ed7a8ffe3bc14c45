"""docs/analytics.md says what is so."""

from __future__ import annotations

import re

from millrace.telemetry.store.store import Store
from tests.support.repository import ROOT
from tests.telemetry.books import fill

PAGE = (ROOT / "docs" / "analytics.md").read_text(encoding="utf-8")
_INTERNAL = {"outbox_ledger", "schema_migrations"}


async def test_tables_are_kept_for_as_long_as_it_says(store: Store) -> None:
    said = {
        name: int(days.replace(",", "")) if days else None
        for name, days in re.findall(
            r"^\| `(\w+)` \|.*\| (?:([\d,]+) days|for ever) \|$", PAGE, re.MULTILINE
        )
    }
    rows = await store.rows(
        "SELECT name, extract(create_table_query, 'TTL .*toIntervalDay\\\\((\\\\d+)\\\\)') "
        "FROM system.tables WHERE database = currentDatabase() AND engine != 'View'"
    )
    kept = {str(name): int(days) if days else None for name, days in rows if name not in _INTERNAL}
    assert kept == said


async def test_its_statements_run(store: Store) -> None:
    await fill(store)
    statements = re.findall(r"```sql\n(.*?)```", PAGE, re.DOTALL)
    assert statements
    for statement in statements:
        wider = statement.replace("INTERVAL 1 DAY", "INTERVAL 4 DAY")
        assert await store.reader.read(wider, {}, "TSV")

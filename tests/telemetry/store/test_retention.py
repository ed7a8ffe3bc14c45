"""Rows stay as long as ``docs/security.md`` says."""

from __future__ import annotations

import re

from millrace.telemetry.store.store import Store
from tests.docs.security_page import kept_s


async def test_tables_keep_rows_for_the_documented_time(store: Store) -> None:
    rows = await store.rows(
        "SELECT name, engine_full FROM system.tables"
        " WHERE database = currentDatabase() AND engine_full LIKE '%TTL%'"
    )
    bounds_s = {}
    for name, engine in rows:
        found = re.search(r"TTL .*?(?:toIntervalDay\((\d+)\)|INTERVAL (\d+) DAY)", engine)
        assert found, engine
        bounds_s[name] = int(found[1] or found[2]) * 86_400.0
    assert bounds_s
    assert bounds_s == {name: s for (kind, name), s in kept_s().items() if kind == "table"}

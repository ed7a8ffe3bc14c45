"""The page of tables: ``python -m millrace.telemetry.store.tables_page > docs/tables.md``."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from itertools import groupby

from millrace.schemas.config import ClickHouseConfig
from millrace.telemetry.store.migrate import migrate
from millrace.telemetry.store.store import Store

_HEAD = """# Columns

Made by `python -m millrace.telemetry.store.tables_page > docs/tables.md` from what ClickHouse
itself says of its tables, which is declared in `telemetry/columns`: `millrace sql --saved tables`,
`/ops/tables.html` and `DESCRIBE TABLE` tell it of a system that runs.

Read the views, whose names end in `_once`, and `generations`: they have each row once. All times
are UTC. A column is only NULL where its type says `Nullable`; its description says when.
"""
_COLUMNS = """
SELECT table, tables.comment, columns.name, type, columns.comment
FROM system.columns AS columns
INNER JOIN system.tables AS tables
    ON tables.database = columns.database AND tables.name = columns.table
WHERE columns.database = currentDatabase()
  AND (endsWith(table, '_once') OR table = 'generations' OR startsWith(type, 'AggregateFunction'))
ORDER BY startsWith(type, 'AggregateFunction'), table, position
"""


async def tables_page(store: Store) -> str:
    """As Markdown, of a store that is up to date."""
    parts = [_HEAD]
    rows = await store.rows(_COLUMNS)
    for (table, what), columns in groupby(rows, key=lambda row: (str(row[0]), str(row[1]))):
        lines = [f"## {table}", "", what, "", "| column | type | meaning |", "|---|---|---|"]
        for _, _, name, kind, comment in columns:
            lines.append(f"| `{name}` | `{_one_line(str(kind))}` | {comment} |")
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def _one_line(kind: str) -> str:
    return " ".join(kind.split()).replace("( ", "(")


async def _main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = await Store.open(ClickHouseConfig(path=folder))
        await migrate(store)
        sys.stdout.write(await tables_page(store))
        await store.close()


if __name__ == "__main__":
    asyncio.run(_main())

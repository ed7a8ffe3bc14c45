"""Page of the tables, as Markdown for the documentation and as rows for the operations page.

``python -m millrace.telemetry.store.tables_page`` in the root of the repository writes both.
"""

from __future__ import annotations

import asyncio
import tempfile
from itertools import groupby
from pathlib import Path

import msgspec

from millrace.schemas.config import ClickHouseConfig
from millrace.telemetry.store.migrate import migrate
from millrace.telemetry.store.store import Store

MARKDOWN = Path("docs/tables.md")
ROWS = Path("gateway/web/ops/tables.json")
_HEAD = """# Columns

Made by `python -m millrace.telemetry.store.tables_page` from what ClickHouse itself says of its
tables, which is declared in `telemetry/columns`: `millrace sql --saved tables`, `/ops/tables.html`
and `DESCRIBE TABLE` tell it of a system that runs.

Read the views, whose names end in `_once`, and `generations`: they have each row once. All times
are UTC. A column is only NULL where its type says `Nullable`; its description says when.
"""
_COLUMNS = """
SELECT table, tables.comment, columns.name, type, columns.comment
FROM system.columns AS columns
INNER JOIN system.tables AS tables
    ON tables.database = columns.database AND tables.name = columns.table
WHERE columns.database = currentDatabase()
  AND (tables.engine = 'View' OR startsWith(type, 'AggregateFunction'))
ORDER BY tables.engine = 'View' DESC, table, position
"""


class Described(msgspec.Struct, frozen=True):
    """Column of a view or table; with an empty name, the view or table itself."""

    table: str
    column: str
    type: str
    comment: str


async def described(store: Store) -> list[Described]:
    """Return the comments of an up-to-date store: each view or table before its columns."""
    found = []
    rows = await store.rows(_COLUMNS)
    for (table, what), columns in groupby(rows, key=lambda row: (str(row[0]), str(row[1]))):
        found.append(Described(table, "", "", what))
        found += [
            Described(table, str(name), _one_line(str(kind)), str(comment))
            for _, _, name, kind, comment in columns
        ]
    return found


def as_markdown(rows: list[Described]) -> str:
    lines = [_HEAD]
    for row in rows:
        if row.column:
            lines.append(f"| `{row.column}` | `{row.type}` | {row.comment} |\n")
        else:
            lines.append(f"\n## {row.table}\n\n{row.comment}\n\n")
            lines.append("| column | type | meaning |\n|---|---|---|\n")
    return "".join(lines)


def as_json(rows: list[Described]) -> str:
    """Render a row in each line."""
    lines = ",\n".join(msgspec.json.encode(row).decode() for row in rows)
    return f"[\n{lines}\n]\n"


def _one_line(kind: str) -> str:
    return " ".join(kind.split()).replace("( ", "(")


async def _described_anew() -> list[Described]:
    with tempfile.TemporaryDirectory() as folder:
        store = await Store.open(ClickHouseConfig(path=folder))
        await migrate(store)
        rows = await described(store)
        await store.close()
    return rows


if __name__ == "__main__":
    found = asyncio.run(_described_anew())
    MARKDOWN.write_text(as_markdown(found), encoding="utf-8")
    ROWS.write_text(as_json(found), encoding="utf-8")

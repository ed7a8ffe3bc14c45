"""Comments of tables and columns, and the views, kept equal to the declaration.

They are compared with the store's after migrations, and differing ones are made again.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from millrace.telemetry.store.declaration import (
    DeclaredColumn,
    DeclaredTable,
    JointView,
    ViewColumn,
    load_declaration,
    load_joint_views,
)
from millrace.telemetry.store.reading import literal, quote
from millrace.telemetry.store.store import Store

# Query for the rows of ``Existing.of``.
STATE = """
SELECT tables.name, tables.comment, tables.as_select, columns.name, columns.type, columns.comment
FROM system.tables AS tables
INNER JOIN system.columns AS columns
    ON columns.database = tables.database AND columns.table = tables.name
WHERE tables.database = currentDatabase()
ORDER BY tables.name, columns.position
"""
# ClickHouse normalises quotes and layout of statements.
_LAYOUT = re.compile(r"[`\s()]+")


class Existing(msgspec.Struct, frozen=True):
    """Table or view of a store: its comment, its query if it is a view, and its columns with type
    and comment, in order."""

    comment: str
    as_select: str
    columns: dict[str, tuple[str, str]]

    @classmethod
    def of(cls, rows: Iterable[Sequence[Any]]) -> dict[str, Existing]:
        """Return the tables and views by name, from the rows of ``STATE``."""
        found: dict[str, Existing] = {}
        for table, comment, as_select, column, kind, meaning in rows:
            one = found.setdefault(str(table), cls(str(comment), str(as_select), {}))
            one.columns[str(column)] = (str(kind), str(meaning))
        return found


class Changes(msgspec.Struct, frozen=True):
    """Statements that bring a store to the declaration: comments by table, and views by view."""

    comments: dict[str, str]
    views: dict[str, str]

    @classmethod
    def of(cls, existing: dict[str, Existing], database: str) -> Changes:
        """Compare a store with the declaration. A table that a migration has yet to make counts as
        one without columns."""
        comments, views = {}, {}
        for table in load_declaration().values():
            there = existing.get(table.name, Existing("", "", {}))
            if parts := _comments(table, there):
                comments[table.name] = f"ALTER TABLE {table.name} {', '.join(parts)}"
            made = _view(table, there, existing.get(table.view), database) if table.view else ""
            if made:
                views[table.view] = made
        for name, view in load_joint_views().items():
            if made := _joint_view(name, view, existing.get(name), database):
                views[name] = made
        return cls(comments, views)

    def summary(self) -> list[str]:
        """Return a line for comments and one for views; none if nothing differs."""
        parts = (("comments of", self.comments), ("views", self.views))
        return [f"{what} {', '.join(changed)}" for what, changed in parts if changed]


async def declare(store: Store) -> list[str]:
    """Bring comments and views of a migrated store to the declaration; return a summary of the
    changes.

    Raises StoreUnavailableError.
    """
    changes = Changes.of(Existing.of(await store.rows(STATE)), store.database)
    for statement in (*changes.comments.values(), *changes.views.values()):
        await store.command(statement)
    return changes.summary()


def _comments(table: DeclaredTable, there: Existing) -> list[str]:
    """Return the parts of an ALTER TABLE."""
    parts = [
        f"COMMENT COLUMN {name} {literal(column.comment)}"
        for name, column in table.columns.items()
        if there.columns.get(name, ("", ""))[1] != column.comment
    ]
    if there.comment != table.comment:
        parts.append(f"MODIFY COMMENT {literal(table.comment)}")
    return parts


def _view(table: DeclaredTable, there: Existing, view: Existing | None, database: str) -> str:
    """Return the statement that makes the view; empty if the view is up to date."""
    columns = [
        column if column.type else msgspec.structs.replace(column, type=kind)
        for name, (kind, _) in there.columns.items()
        for column in table.view_columns(name)
    ]
    source = f"{quote(database)}.{table.name}"
    select = " ".join(("SELECT", ", ".join(map(_selected, columns)), "FROM", source, "FINAL"))
    if table.whole_in:
        parts = ", ".join(_whole(table.columns[column.name], column) for column in columns)
        whole = f"{quote(database)}.{table.whole_in}"
        rest = ("UNION ALL SELECT", parts, "FROM", whole, "FINAL WHERE is_whole")
        select = " ".join((select, *rest))
    wanted = Existing(
        comment=table.view_comment,
        as_select=select,
        columns={column.name: (column.type, column.comment) for column in columns},
    )
    return _statement(table.view, wanted, view)


def _joint_view(name: str, declared: JointView, view: Existing | None, database: str) -> str:
    """Return the statement that makes a view over several tables; empty if it is up to date."""
    wanted = Existing(
        comment=declared.what,
        as_select=declared.select.strip().format(database=quote(database)),
        columns={name: (column.type, column.comment) for name, column in declared.columns.items()},
    )
    return _statement(name, wanted, view)


def _statement(name: str, wanted: Existing, view: Existing | None) -> str:
    if view is not None and _normal(view) == _normal(wanted):
        return ""
    columns = ", ".join(
        f"{column} {kind} COMMENT {literal(comment)}"
        for column, (kind, comment) in wanted.columns.items()
    )
    return (
        f"CREATE OR REPLACE VIEW {name} ({columns}) "
        f"COMMENT {literal(wanted.comment)} AS {wanted.as_select}"
    )


def _normal(view: Existing) -> tuple[object, ...]:
    return view.comment, _LAYOUT.sub("", view.as_select), tuple(view.columns.items())


def _selected(column: ViewColumn) -> str:
    if column.expression == column.name:
        return column.name
    return f"{column.expression} AS {column.name}"


def _whole(declared: DeclaredColumn, column: ViewColumn) -> str:
    return f"{declared.whole} AS {column.name}" if declared.whole else _selected(column)

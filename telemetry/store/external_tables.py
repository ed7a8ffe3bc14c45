"""External tables: rows sent with a query, as a temporary table of the query's connection."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from millrace.telemetry.store.reading import ExternalTable, QueryError, quote
from millrace.telemetry.store.sql_guard import Token, tokens_of, unquoted

_BAD_ARGUMENTS = 36
_UNKNOWN_FORMAT = 73
_NAME = re.compile(r"\w{1,128}")
_FORMAT = re.compile(r"[A-Za-z]\w*")
# Clauses that may follow the type of a column in ClickHouse. Their expressions are computed outside
# of the checked statement.
_CLAUSES = frozenset(
    {
        "alias",
        "codec",
        "collate",
        "comment",
        "default",
        "ephemeral",
        "materialized",
        "primary",
        "settings",
        "statistics",
        "ttl",
    }
)
_OPENING, _CLOSING = frozenset("([{"), frozenset(")]}")


def load(connection: Any, table: ExternalTable) -> None:
    """Create the table in a connection that is not read-only yet, and insert its rows.

    Raises QueryError for an invalid table, and the engine's errors for invalid types and rows.
    """
    if not _NAME.fullmatch(table.name):
        raise _refuse(f"{table.name:.140} is no name of an external table: use letters and digits")
    if not _FORMAT.fullmatch(table.input_format):
        raise QueryError.refusing(
            _UNKNOWN_FORMAT, f"Unknown format {table.input_format:.100}. (UNKNOWN_FORMAT)"
        )
    columns = ", ".join(f"{quote(name)} {kind}" for name, kind in _columns(table))
    connection.query(f"CREATE TEMPORARY TABLE {quote(table.name)} ({columns}) ENGINE = Memory")
    with connection.send_insert(f"INSERT INTO {quote(table.name)}", table.input_format) as rows:
        if table.data:
            rows.append(table.data)
        rows.finish()


def _columns(table: ExternalTable) -> Iterator[tuple[str, str]]:
    """Yield the name and the type of each column."""
    if bool(table.structure) == bool(table.types):
        raise _refuse(
            f"the external table {table.name} needs one of {table.name}_structure and "
            f"{table.name}_types"
        )
    text = table.structure or table.types
    for number, tokens in enumerate(_listed(tokens_of(text)), 1):
        name = f"_{number}"
        if table.structure and tokens:
            name, tokens = unquoted(tokens[0]), tokens[1:]
        if not tokens:
            raise _refuse(f"a column of the external table {table.name} lacks its name or type")
        clause = next((t for t in tokens if t.kind == "word" and t.name in _CLAUSES), None)
        if clause is not None or any(token.text == ";" for token in tokens):
            what = clause.text if clause else ";"
            raise _refuse(
                f"a column of the external table {table.name} has a name and a type, not {what:.40}"
            )
        yield name, text[tokens[0].start : tokens[-1].end]


def _listed(tokens: list[Token]) -> Iterator[list[Token]]:
    """Split tokens at commas outside of brackets."""
    part: list[Token] = []
    depth = 0
    for token in tokens:
        depth += (token.text in _OPENING) - (token.text in _CLOSING)
        if depth < 0:
            raise _refuse(f"{token.text} closes no bracket in the structure of an external table")
        if token.text == "," and not depth:
            yield part
            part = []
        else:
            part.append(token)
    if depth:
        raise _refuse("a bracket is not closed in the structure of an external table")
    yield part


def _refuse(why: str) -> QueryError:
    return QueryError.refusing(_BAD_ARGUMENTS, f"{why[0].upper()}{why[1:]}. (BAD_ARGUMENTS)")

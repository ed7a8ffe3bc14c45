"""``system.processes`` and KILL QUERY over the embedded engine, by the ids that clients know.

The engine gives each query its own id. A setting of the query holds its tag, which the engine shows
in ``system.processes`` and does not use otherwise here: a unique key, a space, and the client's id.
Queries of several users may have the same id, and a query may follow another one with its id.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection

from millrace.telemetry.store.reading import literal
from millrace.telemetry.store.sql_guard import (
    KILL,
    QUERY_ID_SETTING,
    Statement,
    Token,
    tokens_of,
)

_TAG = f"Settings['{QUERY_ID_SETTING}']"
_KNOWN_ID = f"if(empty({_TAG}), query_id, substring({_TAG}, position({_TAG}, ' ') + 1))"
_keys = itertools.count(1)
# The client's statement, without the engine's output clause.
_QUERY = r"replaceRegexpOne(query, ' INTO OUTFILE \'[^\']*\' APPEND COMPRESSION \'none\'', '')"
_PROCESSES = (
    (
        "(SELECT * REPLACE ({id} AS query_id, {id} AS initial_query_id, {query} AS query) "
        "FROM system.processes)"
    )
    .replace("{id}", _KNOWN_ID)
    .replace("{query}", _QUERY)
)
# Columns as in ``query_watch.RunningQuery``.
RUNNING = (
    "SELECT {tag}, memory_usage, elapsed, thread_ids FROM system.processes WHERE notEmpty({tag})"
).replace("{tag}", _TAG)
_FROM_PROCESSES = f"FROM {_PROCESSES}"
_BEFORE_TABLE = frozenset({"from", "join"})
_MODES = frozenset({"sync", "async", "test"})


def new_tag(query_id: str) -> str:
    """Return the tag of a new query."""
    return f"{next(_keys)} {query_id}"


def with_known_ids(statement: Statement, database: str) -> str:
    """Return the statement's head with ``system.processes`` changed to show the clients' ids."""
    tokens = tokens_of(statement.head)
    names = [token.name for token in tokens]
    if names[:2] == ["show", "processlist"]:
        return f"SELECT * {_FROM_PROCESSES}"
    if "processes" not in names:
        return statement.head
    parts: list[str] = []
    written = 0
    for first, last in _places(tokens, database):
        alias = "" if last + 1 < len(tokens) and names[last + 1] == "as" else " AS processes"
        parts += [statement.head[written : tokens[first].start], _PROCESSES, alias]
        written = tokens[last].end
    return "".join([*parts, statement.head[written:]])


def _places(tokens: list[Token], database: str) -> list[tuple[int, int]]:
    """Return the first and the last token of each table ``system.processes``."""
    places = []
    for number, token in enumerate(tokens[1:], 1):
        if tokens[number - 1].name not in _BEFORE_TABLE:
            continue
        path = [each.name or each.text for each in tokens[number : number + 3]]
        if path == ["system", ".", "processes"]:
            places.append((number, number + 2))
        elif token.name == "processes" and path[1:2] != ["."] and database == "system":
            places.append((number, number))
    return places


class Kill:
    """KILL QUERY statement as queries that find its targets."""

    def __init__(self, statement: Statement) -> None:
        tokens = tokens_of(statement.head)
        where = next(number for number, token in enumerate(tokens) if token.name == "where")
        mode = tokens[-1]
        self.is_test = mode.name == "test"
        end = mode.start if mode.kind == "word" and mode.name in _MODES else mode.end
        self._condition = statement.head[tokens[where].end : end]

    def find(self, tags: Collection[str]) -> str:
        """Return a query for those of ``tags`` that the statement selects."""
        where = f"AS processes WHERE {_TAG} IN {_list(tags)} AND ({self._condition})"
        return f"SELECT {_TAG} {_FROM_PROCESSES} {where}"


def is_kill(statement: Statement) -> bool:
    """Return whether the statement is a KILL QUERY."""
    return statement.kind == KILL


def found(tags: Collection[str]) -> str:
    """Return the answer to a KILL QUERY that ends these queries."""
    columns = "'waiting' AS kill_status, query_id, user, query"
    return f"SELECT {columns} {_FROM_PROCESSES} WHERE {_TAG} IN {_list(tags)}"


def kill_statement(tags: Collection[str]) -> str:
    """Return the statement that ends the queries with these tags."""
    return f"KILL QUERY WHERE {_TAG} IN {_list(tags)} ASYNC"


def _list(tags: Collection[str]) -> str:
    return f"[{', '.join(map(literal, tags))}]" if tags else "['']"

"""``system.processes`` and KILL QUERY over the embedded engine, by the ids that clients know.

The engine gives each query an id of its own. The id that the client knows is in a setting of the
query, which the engine shows in ``system.processes`` and uses for nothing else here.
"""

from __future__ import annotations

from collections.abc import Collection

from millrace.telemetry.store.reading import literal
from millrace.telemetry.store.sql_guard import (
    KILL,
    QUERY_ID_SETTING,
    Statement,
    Token,
    tokens_of,
)

_ID = f"Settings['{QUERY_ID_SETTING}']"
_KNOWN_ID = f"if(empty({_ID}), query_id, {_ID})"
# The statement as its client sent it, without the place where the engine writes the answer.
_QUERY = r"replaceRegexpOne(query, ' INTO OUTFILE \'[^\']*\' APPEND COMPRESSION \'none\'', '')"
_PROCESSES = (
    (
        "(SELECT * REPLACE ({id} AS query_id, {id} AS initial_query_id, {query} AS query) "
        "FROM system.processes)"
    )
    .replace("{id}", _KNOWN_ID)
    .replace("{query}", _QUERY)
)
# As ``query_watch.RunningQuery``.
RUNNING = (
    "SELECT {id}, memory_usage, elapsed, thread_ids FROM system.processes WHERE notEmpty({id})"
).replace("{id}", _ID)
_FROM_PROCESSES = f"FROM {_PROCESSES}"
_BEFORE_TABLE = frozenset({"from", "join"})
_MODES = frozenset({"sync", "async", "test"})


def with_known_ids(statement: Statement, database: str) -> str:
    """The statement's head, in which ``system.processes`` shows the ids that clients know."""
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
    """The first and the last token of each table ``system.processes``."""
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
    """A statement KILL QUERY, as queries that find what it is to end."""

    def __init__(self, statement: Statement) -> None:
        tokens = tokens_of(statement.head)
        where = next(number for number, token in enumerate(tokens) if token.name == "where")
        mode = tokens[-1]
        self.is_test = mode.name == "test"
        end = mode.start if mode.kind == "word" and mode.name in _MODES else mode.end
        self._condition = statement.head[tokens[where].end : end]

    def find(self, ids: Collection[str]) -> str:
        """The ids of the queries that the statement means, among these."""
        where = f"AS processes WHERE query_id IN {_list(ids)} AND ({self._condition})"
        return f"SELECT query_id {_FROM_PROCESSES} {where}"


def is_kill(statement: Statement) -> bool:
    """Whether it is a KILL QUERY."""
    return statement.kind == KILL


def found(ids: Collection[str]) -> str:
    """The answer to a KILL QUERY that ends these."""
    columns = "'waiting' AS kill_status, query_id, user, query"
    return f"SELECT {columns} {_FROM_PROCESSES} WHERE query_id IN {_list(ids)}"


def kill_statement(ids: Collection[str]) -> str:
    """Ends the queries with these ids."""
    return f"KILL QUERY WHERE {_ID} IN {_list(ids)} ASYNC"


def _list(ids: Collection[str]) -> str:
    return f"[{', '.join(map(literal, ids))}]" if ids else "['']"

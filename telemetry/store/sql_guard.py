"""A look at SQL before the engine runs it: one statement, and one that only reads.

The engine's own grants and read-only mode keep it from writing and from reaching out
(``embedded_engine``, ``deploy/clickhouse``). What an embedded engine does outside them is refused
here, in the engine's own spelling of the statement: kinds of statements that are not listed, INTO
OUTFILE, and whatever bears the name of a function of files or of the host's Python.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from millrace.telemetry.store.reading import QueryError

READONLY = 164
EMPTY_QUERY = 62
_READING = frozenset({"select", "with", "show", "describe", "desc", "explain", "exists"})
# A function may be called without brackets behind its name, as APPLY(f) and arrayMap(f, …) do: the
# name alone is refused.
_REACHING_OUT = frozenset({"file", "python", "executable", "arrowstream", "eval"})
_NAME_PARAMETER = re.compile(r"\{\s*(\w+)\s*:\s*Identifier\s*\}")
_PLAIN_NAME = re.compile(r"[\w.]+")

_TOKEN = re.compile(
    r"""
      (?P<space>\s+|--[^\n]*|\#[!\ ][^\n]*|/\*.*?\*/)
    | (?P<string>'(?:[^'\\]|\\.|'')*')
    | (?P<quoted>"(?:[^"\\]|\\.|"")*"|`(?:[^`\\]|\\.|``)*`)
    | (?P<heredoc>\$(?P<tag>\w*)\$.*?\$(?P=tag)\$)
    | (?P<word>[^\W\d]\w*)
    | (?P<other>.)
    """,
    re.DOTALL | re.VERBOSE,
)


def require_reading(sql: str) -> str:
    """The statement without leading comments and closing semicolons.

    Raises QueryError with ClickHouse's code for anything that is not one reading statement.
    """
    following: list[str] = []
    start: int | None = None
    end = 0
    ended = False
    previous = ""
    for match in _TOKEN.finditer(sql):
        kind, text = match.lastgroup, match.group()
        if kind == "space":
            continue
        if text == ";":
            ended = True
            continue
        if ended:
            raise _refuse("one statement at a time, without another after ';'")
        if start is None:
            start = match.start()
        end = match.end()
        name = text.strip('"`').lower() if kind in {"word", "quoted"} else ""
        if name in _REACHING_OUT:
            raise _refuse(f"the function {name} reaches out of the database")
        if (previous, name, kind) == ("into", "outfile", "word"):
            raise _refuse("INTO OUTFILE writes a file")
        previous = name
        following.append(text)
    if start is None:
        raise QueryError.refusing(EMPTY_QUERY, "Empty query.")
    first = next((text for text in following if text != "("), "").lower()
    if first not in _READING:
        raise _refuse(
            f"{first.upper():.100} is not one of SELECT, WITH, SHOW, DESCRIBE, EXPLAIN, EXISTS"
        )
    return sql[start:end]


def require_plain_names(statement: str, parameters: Mapping[str, object]) -> None:
    """Raises QueryError if a parameter that stands for a name brings in one that
    ``require_reading`` refuses."""
    for name in _NAME_PARAMETER.findall(statement):
        value = str(parameters.get(name, ""))
        if not _PLAIN_NAME.fullmatch(value):
            raise _refuse(f"the parameter {name} is not a plain name")
        for part in value.lower().split("."):
            if part in _REACHING_OUT:
                raise _refuse(f"the function {part} reaches out of the database")


def _refuse(why: str) -> QueryError:
    return QueryError.refusing(
        READONLY, f"Cannot execute query in readonly mode: {why}. (READONLY)"
    )

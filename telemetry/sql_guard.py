"""A look at SQL before the engine sees it: one statement, and one that only reads.

The engine's own readonly mode refuses writes, DDL, and table functions that reach out. What it
lets through is refused here: INTO OUTFILE, KILL, and functions of files and of the host's Python.
"""

from __future__ import annotations

import re

from telemetry.reading import QueryError

READONLY = 164
EMPTY_QUERY = 62
_READING = frozenset({"select", "with", "show", "describe", "desc", "explain", "exists"})
_REACHING_OUT = frozenset({"file", "python", "executable", "catboostevaluate"})

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
    words: list[tuple[str, int]] = []
    following: list[str] = []
    start: int | None = None
    end = 0
    ended = False
    previous = ""
    for match in _TOKEN.finditer(sql):
        kind, text = match.lastgroup, match.group()
        if kind == "tag":
            kind = "heredoc"
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
        name = text.strip('"`').lower() if kind == "quoted" else text.lower()
        if text == "(" and previous in _REACHING_OUT:
            raise _refuse(f"the function {previous} reaches out of the database")
        if kind == "word":
            words.append((name, match.start()))
            if name == "outfile" and previous == "into":
                raise _refuse("INTO OUTFILE writes a file")
        previous = name if kind in {"word", "quoted"} else ""
        following.append(text)
    if start is None:
        raise QueryError(EMPTY_QUERY, f"Code: {EMPTY_QUERY}. DB::Exception: Empty query.")
    first = next((text for text in following if text != "("), "").lower()
    if first not in _READING:
        raise _refuse(
            f"{first.upper()} is not one of SELECT, WITH, SHOW, DESCRIBE, EXPLAIN, EXISTS"
        )
    return sql[start:end]


def _refuse(why: str) -> QueryError:
    return QueryError(
        READONLY,
        f"Code: {READONLY}. DB::Exception: Cannot execute query in readonly mode: {why}. "
        "(READONLY)",
    )

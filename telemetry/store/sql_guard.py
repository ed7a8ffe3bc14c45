"""A look at SQL before the engine runs it: one statement, and one that only reads.

The engine's own grants and read-only mode keep it from writing and from reaching out
(``embedded_engine``, ``deploy/clickhouse``). What an embedded engine does outside them is refused
here, in the engine's own spelling of the statement: kinds of statements that are not listed, INTO
OUTFILE, and whatever bears the name of a function of files or of the host's Python.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from millrace.telemetry.store.reading import QueryError

READONLY = 164
EMPTY_QUERY = 62
_READING = frozenset({"select", "with", "show", "describe", "desc", "explain", "exists"})
KILL = "kill"
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


class Token(NamedTuple):
    """A word, a string, a quoted name or a sign. ``name`` is that of a word or a quoted name, in
    small letters; empty for others."""

    kind: str
    text: str
    name: str
    start: int
    end: int


class Statement(NamedTuple):
    """One reading statement, without leading comments and closing semicolons.

    ``output_format`` is the one of its FORMAT clause, empty without one; ``head`` is the text
    before that clause, and ``tail`` the text behind it.
    """

    text: str
    kind: str
    head: str
    output_format: str
    tail: str


def tokens_of(sql: str) -> list[Token]:
    """All but space and comments."""
    tokens = []
    for match in _TOKEN.finditer(sql):
        kind, text = match.lastgroup or "", match.group()
        if kind != "space":
            name = text.strip('"`').lower() if kind in {"word", "quoted"} else ""
            tokens.append(Token(kind, text, name, match.start(), match.end()))
    return tokens


def require_reading(sql: str) -> Statement:
    """The statement. Raises QueryError with ClickHouse's code for anything that is not one reading
    statement or KILL QUERY."""
    tokens = tokens_of(sql)
    previous = ""
    for number, token in enumerate(tokens):
        if token.text == ";":
            if any(following.text != ";" for following in tokens[number:]):
                raise _refuse("one statement at a time, without another after ';'")
            tokens = tokens[:number]
            break
        if token.name in _REACHING_OUT:
            raise _refuse(f"the function {token.name} reaches out of the database")
        if (previous, token.name, token.kind) == ("into", "outfile", "word"):
            raise _refuse("INTO OUTFILE writes a file")
        previous = token.name
    if not tokens:
        raise QueryError.refusing(EMPTY_QUERY, "Empty query.")
    kind = next((token.text for token in tokens if token.text != "("), "").lower()
    is_kill = [token.name for token in tokens[:2]] == [KILL, "query"]
    if kind not in _READING and not is_kill:
        raise _refuse(
            f"{kind.upper():.100} is not one of SELECT, WITH, SHOW, DESCRIBE, EXPLAIN, EXISTS, "
            "KILL QUERY"
        )
    return _in_parts(sql, tokens, kind)


def _in_parts(sql: str, tokens: list[Token], kind: str) -> Statement:
    start, end = tokens[0].start, tokens[-1].end
    clause = _format_clause(tokens)
    if clause is None:
        return Statement(sql[start:end], kind, sql[start:end], "", "")
    word, named = tokens[clause], tokens[clause + 1]
    return Statement(
        text=sql[start:end],
        kind=kind,
        head=sql[start : word.start].rstrip(),
        output_format=named.text.strip('"`'),
        tail=sql[named.end : end].strip(),
    )


def _format_clause(tokens: list[Token]) -> int | None:
    """Where ``FORMAT name`` stands: outside of brackets, and at the end or before SETTINGS."""
    depth = 0
    for number in range(len(tokens) - 1, 0, -1):
        token = tokens[number - 1]
        named = tokens[number]
        depth += (named.text in {")", "]"}) - (named.text in {"(", "["})
        if depth or (token.kind, token.name) != ("word", "format") or not named.name:
            continue
        before = tokens[number - 2] if number > 1 else None
        behind = tokens[number + 1] if number + 1 < len(tokens) else None
        if before is not None and (before.name in {"as", "select"} or before.text in {".", ","}):
            continue
        if behind is None or behind.name == "settings":
            return number - 1
    return None


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

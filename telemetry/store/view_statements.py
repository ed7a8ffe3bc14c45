"""Statements that make, rename and drop the views of analysts, parsed from their normal form.

The normal form is the engine's own spelling of a statement (``formatQuerySingleLine``): keywords in
capitals, names quoted where needed, no comments.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence, Set
from typing import TypeVar

import msgspec

from millrace.telemetry.store.reading import QueryError, quote
from millrace.telemetry.store.sql_guard import (
    READONLY,
    Token,
    first_word,
    require_reading,
    tokens_of,
    unquoted,
)

ANALYSTS = "analysts"
MAX_VIEW_CHARS = 64 * 1024

_FIRST_WORDS = frozenset({"create", "drop", "rename", "exchange", "alter"})
_NAME = re.compile(r"\w{1,128}")
_ACCESS_DENIED = 497
_TOO_LARGE = 62
_BAD_NAME = 36
_HOW = (
    f"Views in the database {ANALYSTS} may be changed, by CREATE [OR REPLACE] VIEW, DROP VIEW, "
    "RENAME TABLE, EXCHANGE TABLES and ALTER TABLE with COMMENT; nothing else may"
)

T = TypeVar("T")


class ViewStatement(msgspec.Struct, frozen=True):
    """Allowed statement with its effect: a view ``created`` from a ``body``, or views ``renamed``
    from one name to another, one after the other."""

    sql: str = ""
    created: str = ""
    body: str = ""
    renamed: tuple[tuple[str, str], ...] = ()


# A statement about the existing database, without an effect.
NOTHING = ViewStatement()


def changes_views(sql: str) -> bool:
    """Return whether the statement's first word belongs to statements that change views."""
    return first_word(sql) in _FIRST_WORDS


def view_statement(normal: str, database: str) -> ViewStatement:
    """Parse the normal form of a statement. ``database`` is the default of unqualified names.

    Raises QueryError for a statement that changes anything but views of analysts.
    """
    if len(normal) > MAX_VIEW_CHARS:
        raise QueryError.refusing(
            _TOO_LARGE, f"The statement has {len(normal)} characters, of {MAX_VIEW_CHARS} at most."
        )
    reader = _Reader(normal, database)
    statement = _read(reader)
    if not reader.is_at_end():
        raise reader.refuse()
    return statement


def _read(reader: _Reader) -> ViewStatement:
    if reader.takes("CREATE", "DATABASE"):
        return reader.database()
    if reader.takes("CREATE", "OR", "REPLACE", "VIEW"):
        return reader.create("CREATE OR REPLACE VIEW")
    if reader.takes("CREATE", "VIEW"):
        return reader.create("CREATE VIEW")
    if reader.takes("DROP", "VIEW") or reader.takes("DROP", "TABLE"):
        return reader.drop()
    if reader.takes("RENAME", "TABLE"):
        return reader.rename()
    if reader.takes("EXCHANGE", "TABLES"):
        first, second = reader.pair("AND")
        sql = f"EXCHANGE TABLES {_in_analysts(first)} AND {_in_analysts(second)}"
        return ViewStatement(sql, renamed=((first, ""), (second, first), ("", second)))
    if reader.takes("ALTER", "TABLE"):
        return reader.alter()
    raise reader.refuse()


class _Reader:
    """Reader of the tokens of a normal form, one after the other."""

    def __init__(self, sql: str, database: str) -> None:
        self._sql = sql
        self._database = database
        self._tokens: Sequence[Token] = tokens_of(sql)
        self._next = 0

    def is_at_end(self) -> bool:
        return self._next == len(self._tokens)

    def takes(self, *texts: str) -> bool:
        """Skip these tokens if they are next; return whether they were."""
        following = self._tokens[self._next : self._next + len(texts)]
        if tuple(token.text for token in following) != texts:
            return False
        self._next += len(texts)
        return True

    def refuse(self) -> QueryError:
        """Return the error for the statement from here on."""
        rest = "" if self.is_at_end() else self._sql[self._tokens[self._next].start :]
        where = f"not {rest:.60}" if rest else "the statement ends too soon"
        return QueryError.refusing(
            READONLY, f"Cannot execute query in readonly mode: {_HOW}: {where}. (READONLY)"
        )

    def database(self) -> ViewStatement:
        exists = self.takes("IF", "NOT", "EXISTS")
        name = self._name()
        if name != ANALYSTS or not exists:
            raise QueryError.refusing(
                _ACCESS_DENIED,
                f"There is one database for views, {ANALYSTS}, and it is there: "
                f"CREATE DATABASE IF NOT EXISTS {ANALYSTS} does nothing. (ACCESS_DENIED)",
            )
        self._next = len(self._tokens)
        return NOTHING

    def create(self, words: str) -> ViewStatement:
        exists = "IF NOT EXISTS" if self.takes("IF", "NOT", "EXISTS") else ""
        name = self._view()
        columns = self._brackets() if self._peek() == "(" else ""
        self.takes("SQL", "SECURITY", "INVOKER")
        comment = f"COMMENT {self._string()}" if self.takes("COMMENT") else ""
        if not self.takes("AS"):
            raise self.refuse()
        body = self._body()
        head = (words, exists, _in_analysts(name), columns, "SQL SECURITY INVOKER", comment)
        return ViewStatement(" ".join([*filter(None, head), f"AS {body}"]), name, body)

    def drop(self) -> ViewStatement:
        exists = "IF EXISTS " if self.takes("IF", "EXISTS") else ""
        names = ", ".join(map(_in_analysts, self._listed(self._view)))
        self.takes("SYNC")
        return ViewStatement(f"DROP VIEW {exists}{names}")

    def rename(self) -> ViewStatement:
        pairs = tuple(self._listed(lambda: self.pair("TO")))
        parts = (f"{_in_analysts(old)} TO {_in_analysts(new)}" for old, new in pairs)
        return ViewStatement(f"RENAME TABLE {', '.join(parts)}", renamed=pairs)

    def pair(self, between: str) -> tuple[str, str]:
        first = self._view()
        if not self.takes(between):
            raise self.refuse()
        return first, self._view()

    def alter(self) -> ViewStatement:
        name = _in_analysts(self._view())
        return ViewStatement(f"ALTER TABLE {name} {', '.join(self._listed(self._command))}")

    def _listed(self, one: Callable[[], T]) -> Iterator[T]:
        """Read items by ``one``, as long as a comma follows."""
        yield one()
        while self.takes(","):
            yield one()

    def _command(self) -> str:
        in_brackets = self.takes("(")
        if self.takes("MODIFY", "COMMENT"):
            command = f"MODIFY COMMENT {self._string()}"
        elif self.takes("COMMENT", "COLUMN"):
            command = f"COMMENT COLUMN {quote(self._name())} {self._string()}"
        else:
            raise self.refuse()
        if in_brackets and not self.takes(")"):
            raise self.refuse()
        return command

    def _view(self) -> str:
        database, name = self._database, self._name()
        if self.takes("."):
            database, name = name, self._name()
        if database != ANALYSTS:
            raise QueryError.refusing(
                _ACCESS_DENIED,
                f"{database:.60}.{name:.60}: {_HOW}. Write {ANALYSTS}.{name:.60}. (ACCESS_DENIED)",
            )
        if not _NAME.fullmatch(name):
            raise QueryError.refusing(
                _BAD_NAME,
                f"A view's name has 1 to 128 letters, digits and underscores, not {name!r:.140}. "
                "(BAD_ARGUMENTS)",
            )
        return name

    def _name(self) -> str:
        return unquoted(self._take({"word", "quoted"}))

    def _string(self) -> str:
        return self._take({"string"}).text

    def _take(self, kinds: Set[str]) -> Token:
        if self.is_at_end() or self._tokens[self._next].kind not in kinds:
            raise self.refuse()
        self._next += 1
        return self._tokens[self._next - 1]

    def _peek(self) -> str:
        return "" if self.is_at_end() else self._tokens[self._next].text

    def _brackets(self) -> str:
        first, depth = self._tokens[self._next], 0
        while not self.is_at_end():
            token = self._tokens[self._next]
            self._next += 1
            depth += (token.text == "(") - (token.text == ")")
            if not depth:
                return self._sql[first.start : token.end]
        raise self.refuse()

    def _body(self) -> str:
        rest = self._tokens[self._next :]
        if not rest:
            raise self.refuse()
        for token, following, sign in zip(rest, rest[1:], rest[2:], strict=False):
            if (token.text, following.kind, sign.text) == ("SETTINGS", "word", "="):
                raise QueryError.refusing(
                    READONLY,
                    f"Cannot execute query in readonly mode: a view has no SETTINGS "
                    f"({following.text}): send them with the question. (READONLY)",
                )
        statement = require_reading(self._sql[rest[0].start :])
        if statement.kind not in {"select", "with"}:
            raise self.refuse()
        self._next = len(self._tokens)
        return statement.head


def _in_analysts(name: str) -> str:
    return f"{ANALYSTS}.{quote(name)}"

"""Statements that make, rename and drop the views of analysts, read from their normal form.

The normal form is the engine's own spelling of a statement (``formatQuerySingleLine``): keywords
are in capitals, names are quoted where they have to be, comments are gone.
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


class Create(msgspec.Struct, frozen=True):
    """CREATE VIEW. ``columns`` and ``comment`` are their clauses, or empty."""

    name: str
    body: str
    columns: str = ""
    comment: str = ""
    replaces: bool = False
    if_not_exists: bool = False

    def sql(self) -> str:
        """The statement to run."""
        parts = (
            "CREATE",
            "OR REPLACE" if self.replaces else "",
            "VIEW",
            "IF NOT EXISTS" if self.if_not_exists else "",
            _in_analysts(self.name),
            self.columns,
            "SQL SECURITY INVOKER",
            self.comment,
            f"AS {self.body}",
        )
        return " ".join(part for part in parts if part)


class Drop(msgspec.Struct, frozen=True):
    """DROP VIEW or DROP TABLE, of one view or several."""

    names: tuple[str, ...]
    if_exists: bool = False

    def sql(self) -> str:
        """The statement to run."""
        exists = "IF EXISTS " if self.if_exists else ""
        return f"DROP VIEW {exists}{', '.join(map(_in_analysts, self.names))}"


class Rename(msgspec.Struct, frozen=True):
    """RENAME TABLE, of one view or several."""

    pairs: tuple[tuple[str, str], ...]

    def sql(self) -> str:
        """The statement to run."""
        parts = (f"{_in_analysts(old)} TO {_in_analysts(new)}" for old, new in self.pairs)
        return f"RENAME TABLE {', '.join(parts)}"


class ExchangeTables(msgspec.Struct, frozen=True):
    """EXCHANGE TABLES: two views take each other's name."""

    first: str
    second: str

    def sql(self) -> str:
        """The statement to run."""
        return f"EXCHANGE TABLES {_in_analysts(self.first)} AND {_in_analysts(self.second)}"


class Comment(msgspec.Struct, frozen=True):
    """ALTER TABLE with commands that set comments alone."""

    name: str
    commands: tuple[str, ...]

    def sql(self) -> str:
        """The statement to run."""
        return f"ALTER TABLE {_in_analysts(self.name)} {', '.join(self.commands)}"


class Nothing(msgspec.Struct, frozen=True):
    """CREATE DATABASE IF NOT EXISTS of the database that is there."""


ViewStatement = Create | Drop | Rename | ExchangeTables | Comment | Nothing


def changes_views(sql: str) -> bool:
    """Whether the statement begins with a word of statements that change views."""
    return first_word(sql) in _FIRST_WORDS


def view_statement(normal: str, database: str) -> ViewStatement:
    """Read the normal form of a statement. ``database`` is the one that names without a database
    are in. Raises QueryError for a statement that changes anything but views of analysts."""
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
        return reader.create(replaces=True)
    if reader.takes("CREATE", "VIEW"):
        return reader.create(replaces=False)
    if reader.takes("DROP", "VIEW") or reader.takes("DROP", "TABLE"):
        return reader.drop()
    if reader.takes("RENAME", "TABLE"):
        return Rename(tuple(reader.listed(reader.pair)))
    if reader.takes("EXCHANGE", "TABLES"):
        return reader.exchange()
    if reader.takes("ALTER", "TABLE"):
        return reader.alter()
    raise reader.refuse()


class _Reader:
    """Takes the tokens of a normal form one after the other."""

    def __init__(self, sql: str, database: str) -> None:
        self._sql = sql
        self._database = database
        self._tokens: Sequence[Token] = tokens_of(sql)
        self._next = 0

    def is_at_end(self) -> bool:
        return self._next == len(self._tokens)

    def takes(self, *texts: str) -> bool:
        """Go past these tokens, if they are next."""
        following = self._tokens[self._next : self._next + len(texts)]
        if tuple(token.text for token in following) != texts:
            return False
        self._next += len(texts)
        return True

    def refuse(self) -> QueryError:
        """The statement as it goes on from here is refused."""
        rest = "" if self.is_at_end() else self._sql[self._tokens[self._next].start :]
        where = f"not {rest:.60}" if rest else "the statement ends too soon"
        return QueryError.refusing(
            READONLY, f"Cannot execute query in readonly mode: {_HOW}: {where}. (READONLY)"
        )

    def database(self) -> Nothing:
        exists = self.takes("IF", "NOT", "EXISTS")
        name = self._name()
        if name != ANALYSTS or not exists:
            raise QueryError.refusing(
                _ACCESS_DENIED,
                f"There is one database for views, {ANALYSTS}, and it is there: "
                f"CREATE DATABASE IF NOT EXISTS {ANALYSTS} does nothing. (ACCESS_DENIED)",
            )
        self._next = len(self._tokens)
        return Nothing()

    def create(self, *, replaces: bool) -> Create:
        if_not_exists = self.takes("IF", "NOT", "EXISTS")
        name = self._view()
        columns = self._brackets() if self._peek() == "(" else ""
        self.takes("SQL", "SECURITY", "INVOKER")
        comment = ""
        if self.takes("COMMENT"):
            comment = f"COMMENT {self._string()}"
        if not self.takes("AS"):
            raise self.refuse()
        body = self._body()
        return Create(name, body, columns, comment, replaces, if_not_exists)

    def drop(self) -> Drop:
        if_exists = self.takes("IF", "EXISTS")
        names = tuple(self.listed(self._view))
        self.takes("SYNC")
        return Drop(names, if_exists)

    def pair(self) -> tuple[str, str]:
        old = self._view()
        if not self.takes("TO"):
            raise self.refuse()
        return old, self._view()

    def exchange(self) -> ExchangeTables:
        first = self._view()
        if not self.takes("AND"):
            raise self.refuse()
        return ExchangeTables(first, self._view())

    def alter(self) -> Comment:
        name = self._view()
        return Comment(name, tuple(self.listed(self._command)))

    def listed(self, one: Callable[[], T]) -> Iterator[T]:
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

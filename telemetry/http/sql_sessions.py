"""Sessions of clients (``session_id``): the settings, database and role that they set."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

import msgspec

from millrace.telemetry.http.arguments import Arguments, is_analyst, parameters_of, settings_of
from millrace.telemetry.store.reading import QueryError
from millrace.telemetry.store.sql_guard import Token, first_word, tokens_of, unquoted

_SESSION_NOT_FOUND, _SYNTAX_ERROR, _TOO_MANY_SESSIONS = 372, 62, 202
_MAX_SESSIONS = 1_000
_MAX_SETTINGS = 200
_ESCAPE = re.compile(r"\\(.)|''", re.DOTALL)


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """Changes by SET or USE for later statements. None: no change."""

    settings: dict[str, str] = {}
    parameters: dict[str, str] = {}
    database: str | None = None
    is_analyst: bool | None = None


class SqlSession(msgspec.Struct, kw_only=True):
    """State of a session. Arguments in a statement's address override it."""

    expires_s: float
    settings: dict[str, str] = {}
    parameters: dict[str, str] = {}
    database: str = ""
    is_analyst: bool = False

    def apply(self, change: Change) -> None:
        """Apply a change. Raises QueryError for too many settings."""
        settings = {**self.settings, **change.settings}
        parameters = {**self.parameters, **change.parameters}
        if len(settings) + len(parameters) > _MAX_SETTINGS:
            raise QueryError.refusing(
                _SYNTAX_ERROR, f"A session has at most {_MAX_SETTINGS} settings."
            )
        self.settings, self.parameters = settings, parameters
        if change.database is not None:
            self.database = change.database
        if change.is_analyst is not None:
            self.is_analyst = change.is_analyst


class SqlSessions:
    """Sessions of all users; an unused session ends after its timeout."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._sessions: dict[tuple[str, str], SqlSession] = {}

    def session(self, user: str, arguments: Arguments) -> SqlSession:
        """Return the session that a request names; without a name, a new one for this request.

        Raises QueryError if the session must exist and does not.
        """
        now_s = self._now_s()
        expires_s = now_s + arguments.session_s
        if not arguments.session_id:
            return SqlSession(expires_s=expires_s)
        self._sessions = {
            key: session for key, session in self._sessions.items() if session.expires_s > now_s
        }
        key = (user, arguments.session_id)
        session = self._sessions.get(key)
        if session is None:
            if arguments.must_have_session:
                raise QueryError.refusing(
                    _SESSION_NOT_FOUND, "Session not found or expired. (SESSION_NOT_FOUND)"
                )
            if len(self._sessions) >= _MAX_SESSIONS:
                raise QueryError.refusing(
                    _TOO_MANY_SESSIONS,
                    f"There are {_MAX_SESSIONS} sessions: ask without session_id, or wait until "
                    "some have expired.",
                )
            session = self._sessions[key] = SqlSession(expires_s=expires_s)
        session.expires_s = expires_s
        return session


def change_of(sql: str) -> Change | None:
    """Parse the changes of SET or USE; None for other statements.

    Raises QueryError for a statement that cannot be parsed.
    """
    if first_word(sql) not in {"set", "use"}:
        return None
    tokens = tokens_of(sql)
    while tokens and tokens[-1].text == ";":
        tokens.pop()
    names = [token.name for token in tokens[:2]]
    if names[:1] == ["use"] and len(tokens) in {2, 3} and tokens[-1].kind in {"word", "quoted"}:
        return Change(database=unquoted(tokens[-1]))
    if names[:1] != ["set"]:
        return None
    if names == ["set", "role"] and len(tokens) == 3:
        role = unquoted(tokens[2])
        return Change(is_analyst=role.lower() != "none" and is_analyst(role))
    if names == ["set", "time"] and len(tokens) == 4:
        return Change(settings={"session_timezone": _text(sql, tokens[3:])})
    return _assigned(sql, tokens[1:])


def _assigned(sql: str, tokens: list[Token]) -> Change:
    given: dict[str, str] = {}
    for part in _parts(tokens):
        if len(part) < 3 or part[1].text != "=" or part[0].kind not in {"word", "quoted"}:
            raise QueryError.refusing(
                _SYNTAX_ERROR, "Syntax error: write SET name = value, … (SYNTAX_ERROR)"
            )
        given[unquoted(part[0])] = _text(sql, part[2:])
    return Change(settings=settings_of(given), parameters=parameters_of(given))


def _parts(tokens: list[Token]) -> list[list[Token]]:
    """Split at commas outside of brackets."""
    parts: list[list[Token]] = [[]]
    depth = 0
    for token in tokens:
        depth += (token.text in "([{") - (token.text in ")]}")
        if token.text == "," and not depth:
            parts.append([])
        else:
            parts[-1].append(token)
    return parts


def _text(sql: str, tokens: list[Token]) -> str:
    if len(tokens) == 1 and tokens[0].kind == "string":
        return _ESCAPE.sub(lambda match: match[1] or "'", tokens[0].text[1:-1])
    return sql[tokens[0].start : tokens[-1].end]

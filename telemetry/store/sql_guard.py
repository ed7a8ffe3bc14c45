"""Check of SQL before the engine runs it: one statement, which only reads.

The engine's own grants and read-only mode keep it from writing and from external access
(``embedded_engine``, ``deploy/clickhouse``). Features of an embedded engine outside of them are
refused here, in the engine's own spelling of the statement: unlisted kinds of statements, INTO
OUTFILE, and every use of the name of a function of files or of the host's Python.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from millrace.telemetry.store.reading import QueryError

READONLY = 164
# The engine has no query id chosen by a client, so this setting holds it.
QUERY_ID_SETTING = "query_cache_tag"
EMPTY_QUERY = 62
_READING = frozenset({"select", "with", "show", "describe", "desc", "explain", "exists"})
KILL = "kill"
# A function may be used without brackets after its name, as in APPLY(f) and arrayMap(f, …), so the
# name alone is refused.
_REACHING_OUT = frozenset({"file", "python", "executable", "arrowstream", "eval"})
_NAME_PARAMETER = re.compile(r"\{\s*(\w+)\s*:\s*Identifier\s*\}")
# Functions that take the structure of a table as a text, with its position among their arguments.
# The engine computes expressions in it, which are not tokens of the statement.
_STRUCTURED = {
    "format": 1,
    "generaterandom": 0,
    "input": 0,
    "null": 0,
    "structuretocapnprotoschema": 0,
    "structuretoprotobufschema": 0,
    "values": 0,
}
_OF_NUMBERS = frozenset("0123456789.+-")
_CLAUSE = re.compile(
    r"\b(?:alias|codec|constraint|default|ephemeral|materialized|settings|ttl)\b", re.IGNORECASE
)
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_PLAIN_NAME = re.compile(r"[\w.]+")

_TOKEN = re.compile(
    r"""
      (?P<space>\s+|--[^\n]*|\#[!\ ][^\n]*|/\*.*?\*/)
    | (?P<string>'(?:[^'\\]|\\.|'')*')
    | (?P<quoted>"(?:[^"\\]|\\.|"")*"|`(?:[^`\\]|\\.|``)*`)
    | (?P<heredoc>\$(?P<tag>\w*)\$.*?\$(?P=tag)\$)
    | (?P<word>[^\W\d]\w*)
    | (?P<other>/\*.*|.)
    """,
    re.DOTALL | re.VERBOSE,
)
_HEREDOC_MARK = re.compile(r"\$\w*\$")
_MAX_HEREDOC_MARKS = 200
# Possessive: a failed match does not backtrack into spaces and comments.
_FIRST_WORD = re.compile(r"(?>\s+|--[^\n]*|\#[!\ ][^\n]*|/\*.*?\*/)*+(\w+)", re.DOTALL)


class Token(NamedTuple):
    """Word, string, quoted name or sign. ``name`` is the lower-case name of a word or a quoted
    name; empty for others."""

    kind: str
    text: str
    name: str
    start: int
    end: int


class Statement(NamedTuple):
    """Reading statement, without leading comments and closing semicolons.

    ``output_format`` is that of its FORMAT clause, empty without one; ``head`` is the text before
    that clause, and ``tail`` the text after it.
    """

    text: str
    kind: str
    head: str
    output_format: str
    tail: str


def tokens_of(sql: str) -> list[Token]:
    """Return all tokens except spaces and comments.

    Raises QueryError for too many heredoc marks: each is searched in the whole rest of the text.
    """
    if len(_HEREDOC_MARK.findall(sql)) > _MAX_HEREDOC_MARKS:
        raise QueryError.refusing(
            EMPTY_QUERY,
            f"Syntax error: more than {_MAX_HEREDOC_MARKS} marks of heredocs such as $tag$. Use "
            "strings, or parameters. (SYNTAX_ERROR)",
        )
    tokens = []
    for match in _TOKEN.finditer(sql):
        kind, text = match.lastgroup or "", match.group()
        if kind != "space":
            name = text.strip('"`').lower() if kind in {"word", "quoted"} else ""
            tokens.append(Token(kind, text, name, match.start(), match.end()))
    return tokens


def first_word(sql: str) -> str:
    """Return the first word of a statement in lower case; empty if it begins otherwise."""
    match = _FIRST_WORD.match(sql)
    return match[1].lower() if match else ""


def unquoted(token: Token) -> str:
    """Return the name that a word or a quoted name stands for."""
    return token.text if token.kind == "word" else _ESCAPE.sub(r"\1", token.text[1:-1])


def require_reading(sql: str) -> Statement:
    """Parse one reading statement or KILL QUERY. Raises QueryError with ClickHouse's code for
    anything else."""
    tokens = tokens_of(sql)
    for number, token in enumerate(tokens):
        if token.text == ";":
            if any(following.text != ";" for following in tokens[number:]):
                raise _refuse("one statement at a time, without another after ';'")
            tokens = tokens[:number]
            break
    clause = _format_clause(tokens)
    previous = ""
    for number, token in enumerate(tokens):
        # The format ArrowStream has the name of a function; a format is not a function.
        is_format = clause is not None and number == clause + 1
        following = tokens[number + 1].text if number + 1 < len(tokens) else ""
        if token.name in _REACHING_OUT and not is_format:
            raise _refuse(f"the function {token.name} reaches out of the database")
        if (previous, token.name, token.kind) == ("into", "outfile", "word"):
            raise _refuse("INTO OUTFILE writes a file")
        if token.name == QUERY_ID_SETTING and following == "=":
            raise _refuse(f"{QUERY_ID_SETTING} holds the id of the query")
        if token.name in _STRUCTURED and number + 1 < len(tokens):
            _require_plain_structure(tokens, number)
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
    return _in_parts(sql, tokens, kind, clause)


def _require_plain_structure(tokens: list[Token], number: int) -> None:
    """Raise QueryError for a call of a function of ``_STRUCTURED`` whose structure is not a literal
    of names and types."""
    name = tokens[number].name
    arguments = _arguments(tokens, number + 1)
    if name == "format" and (len(arguments) < 3 or _is_pattern(arguments[0])):
        # A text with placeholders, or a format and its data.
        return
    structure = arguments[_STRUCTURED[name]] if arguments else []
    is_row = name == "values" and structure[:1] and structure[0].text == "("
    if is_row or all(token.text in _OF_NUMBERS for token in structure):
        return
    if len(structure) > 1 or structure[0].kind != "string":
        raise _refuse(f"the structure of {name} is not a text as it stands")
    clause = _CLAUSE.search(structure[0].text)
    if clause is not None:
        raise _refuse(f"the structure of {name} has a column with {clause[0]}")


def _is_pattern(argument: list[Token]) -> bool:
    return len(argument) == 1 and argument[0].kind == "string" and "{" in argument[0].text


def _arguments(tokens: list[Token], start: int) -> list[list[Token]]:
    """Return the arguments in the brackets that open at ``start``; none without brackets."""
    arguments: list[list[Token]] = []
    depth = 0
    for token in tokens[start:]:
        is_opening = token.text in {"(", "[", "{"}
        depth += is_opening - (token.text in {")", "]", "}"})
        if depth < 1 or (not arguments and token.text != "("):
            break
        if not arguments or (token.text == "," and depth == 1):
            arguments.append([])
        else:
            arguments[-1].append(token)
    return arguments


def _in_parts(sql: str, tokens: list[Token], kind: str, clause: int | None) -> Statement:
    start, end = tokens[0].start, tokens[-1].end
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
    """Return the position of ``FORMAT name``: outside of brackets, and at the end or before
    SETTINGS."""
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
    """Raise QueryError if a parameter for a name has a value that ``require_reading`` refuses."""
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

"""``millrace sql``: query the analytics store."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from millrace.cli.analytics.store import Value, ask, ask_saved
from millrace.cli.arguments import path_or_name
from millrace.cli.endpoints import add_data_argument
from millrace.schemas.errors import MillraceError, ParameterError

_NAME = re.compile(r"[A-Za-z_]\w*")
_MAX_SHOWN_CHARS = 2_000
_STDIN = "-"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare ``millrace sql``."""
    parser = subparsers.add_parser(
        "sql",
        help="query the analytics store",
        description="Run one reading statement (SELECT, WITH, SHOW, DESCRIBE, EXPLAIN) in the "
        "database millrace: on the system that runs on DIR, else on the store of its last run. A "
        "statement's parameters have the form {name:Type}.",
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("query", metavar="SQL", nargs="?")
    what.add_argument(
        "--file",
        type=path_or_name,
        metavar="FILE",
        help="read the statement from this file (- is stdin)",
    )
    what.add_argument("--saved", metavar="NAME", help="run a saved query; see --list")
    what.add_argument(
        "--list", action="store_true", help="list the saved queries with their parameters"
    )
    parser.add_argument(
        "--param",
        action="append",
        default=[],
        type=_parameter,
        metavar="NAME=VALUE",
        help="the value of a parameter; may be given several times",
    )
    parser.add_argument("--format", choices=("table", "json", "csv"), default="table")
    add_data_argument(parser)
    parser.set_defaults(handler=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the query; return 0, or 1 if the engine refuses it. Raises NoStoreError without a
    store."""
    from millrace.cli.analytics.rows import parse_rows, render
    from millrace.telemetry.store.reading import QueryError

    if arguments.list:
        print(list_queries())
        return 0
    given = _given(arguments.param)
    try:
        if arguments.saved is not None:
            rows = ask_saved(arguments.saved, given, arguments.data)
        else:
            sql = _checked(_statement(arguments))
            rows = parse_rows(ask(sql, arguments.data, given))
        rendered = render(rows, arguments.format)
    except QueryError as error:
        print(f"millrace sql: {error.message[:_MAX_SHOWN_CHARS].strip()}", file=sys.stderr)
        return 1
    sys.stdout.write(rendered)
    return 0


def list_queries() -> str:
    """List the saved queries, one per line: its subject, and its parameters with their defaults."""
    from millrace.telemetry.http.answers import load_queries

    queries = load_queries()
    width = max(map(len, queries))
    lines = []
    for name in sorted(queries):
        query = queries[name]
        lines.append(f"{name:<{width}}  {query.summary}")
        shown = [
            f"{p.name} (must be given)" if p.default is None else f"{p.name}={p.default}"
            for p in query.parameters.values()
        ]
        if shown:
            lines.append(f"{'':<{width}}    {' '.join(shown)}")
    return "\n".join(lines)


def _parameter(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator or not _NAME.fullmatch(name):
        raise argparse.ArgumentTypeError(f"{text!r} is not like name=value")
    return name, value


def _given(pairs: list[tuple[str, str]]) -> dict[str, Value]:
    given: dict[str, Value] = {}
    for name, value in pairs:
        if name in given:
            raise ParameterError("param", f"--param {name} is given twice")
        given[name] = value
    return given


def _statement(arguments: argparse.Namespace) -> str:
    if arguments.file is None:
        query: str = arguments.query
        return query
    if arguments.file == _STDIN:
        return sys.stdin.read()
    try:
        return Path(arguments.file).read_text(encoding="utf-8")
    except OSError as error:
        raise MillraceError(
            f"{arguments.file} cannot be read: {error.strerror or error}"
        ) from error
    except UnicodeDecodeError as error:
        raise MillraceError(f"{arguments.file} is not UTF-8 text") from error


def _checked(query: str) -> str:
    from millrace.telemetry.store.reading import QueryError
    from millrace.telemetry.store.sql_guard import require_reading

    try:
        statement = require_reading(query)
    except QueryError as error:
        why = error.message.rpartition(": ")[2].removesuffix("(READONLY)").strip()
        raise MillraceError(f"one reading statement is run at a time: {why}") from error
    if statement.output_format:
        raise MillraceError("leave FORMAT out of the query and use --format")
    return statement.text

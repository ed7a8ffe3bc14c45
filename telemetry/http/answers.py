"""Answers for the operations page: saved queries by name, and the state of the alerts.

CSV answers (RFC 4180) are safe for spreadsheets: no cell is a formula.
"""

from __future__ import annotations

import csv
import io
import logging
import re
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any

import msgspec

from millrace.runtime.alerts.watch import Alert, AlertCondition, alert_of
from millrace.schemas.control import TelemetryAnswer, TelemetryQuery
from millrace.schemas.errors import ParameterError
from millrace.telemetry.http.parameters import Parameter, parameters_of, read_values
from millrace.telemetry.store.reading import TOO_MANY_QUERIES, QueryError, Reader

logger = logging.getLogger(__name__)

# An answer is one message of the bus, whose servers accept 1 MiB by default.
_MAX_ANSWER_BYTES = 1_000_000
_BUSY = "telemetry_unavailable"
ALERTS = "alerts"
_CONDITIONS = "alert_conditions"
_FRAGMENT = re.compile(r"^( *)(.*)\{\{(\w+)\}\}", re.MULTILINE)


class _Seen(msgspec.Struct, frozen=True):
    """Row of the query ``alert_conditions``."""

    alert: str
    subject: str
    value: float | None
    bound: float
    is_over: int
    since_s: float | None


class SavedQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Saved query: a file of ``telemetry/queries``. It has its SQL with fragments inserted, its
    description (the first comment), and its parameters."""

    name: str
    sql: str
    summary: str
    parameters: dict[str, Parameter]

    @property
    def defaults(self) -> dict[str, str]:
        """Return the optional parameters with their defaults."""
        return {p.name: p.default for p in self.parameters.values() if p.default is not None}


def load_queries() -> dict[str, SavedQuery]:
    """Return the saved queries by name, which is the file's name without ``.sql``."""
    folder = resources.files("millrace.telemetry").joinpath("queries")
    fragments = dict(_read(folder / "fragments"))

    def fragment(place: re.Match[str]) -> str:
        indent, before, name = place.groups()
        return indent + before + without_comments(fragments[name]).replace("\n", f"\n{indent}")

    queries = {}
    for name, text in _read(folder):
        sql = _FRAGMENT.sub(fragment, text)
        used = (fragments[each] for *_, each in _FRAGMENT.findall(text))
        queries[name] = SavedQuery(
            name=name,
            sql=sql,
            summary=sql.partition("\n")[0].removeprefix("--").strip(),
            parameters=parameters_of(sql, "\n".join((*used, text))),
        )
    return queries


def without_comments(sql: str) -> str:
    """Return the lines that are not comments."""
    return "\n".join(line for line in sql.splitlines() if not line.startswith("--"))


def _read(folder: Traversable) -> Iterator[tuple[str, str]]:
    for file in folder.iterdir():
        if file.name.endswith(".sql"):
            yield file.name.removesuffix(".sql"), file.read_text(encoding="utf-8").strip()


class SavedQueryAnswers:
    """Runner of saved queries that answers their rows, as a JSON array of objects or as CSV.

    In JSON, 64-bit integers are strings, as browsers and many other readers round numbers above
    2^53. ``alerts`` is not a query: it is the state of the alerts from rows and from
    ``own_alerts``.
    """

    def __init__(self, reader: Reader, own_alerts: Callable[[], Sequence[Alert]] = tuple) -> None:
        self._reader = reader
        self._own_alerts = own_alerts
        self._seen = msgspec.json.Decoder(tuple[_Seen, ...], strict=False)
        self._queries = load_queries()

    async def answer(self, asked: TelemetryQuery) -> TelemetryAnswer:
        """Answer a query. Never raises: ``error`` has the problem, ``code`` and ``param`` its
        kind."""
        if asked.name == ALERTS and asked.format == "json":
            return await self._alerts(asked)
        query = self._queries.get(asked.name)
        if query is None:
            known = ", ".join(sorted(self._queries))
            error = f"unknown query {asked.name[:60]!r}; there are {known}"
            return TelemetryAnswer(error=error, code="not_found")
        try:
            values = read_values(query.name, query.parameters, asked.params, time.time())
        except ParameterError as refused:
            return TelemetryAnswer(error=refused.message, code=refused.code, param=refused.param)
        wants_csv = asked.format == "csv"
        output = "JSONCompactEachRowWithNames" if wants_csv else "JSONEachRow"
        try:
            lines = await self._reader.read(
                query.sql, values, output, quotes_integers=not wants_csv
            )
        except QueryError as error:
            logger.info("a saved query failed", extra={"query": asked.name, "reason": str(error)})
            code = _BUSY if error.number == TOO_MANY_QUERIES else error.code
            return TelemetryAnswer(error=error.message, code=code)
        body = csv_of(lines) if wants_csv else b"[" + b",".join(lines.splitlines()) + b"]"
        if len(body) > _MAX_ANSWER_BYTES:
            error_text = (
                f"The answer to {query.name} is {len(body)} bytes, of {_MAX_ANSWER_BYTES} that fit "
                "into one: ask for a shorter range, longer steps or fewer rows."
            )
            return TelemetryAnswer(error=error_text, code="answer_too_large")
        return TelemetryAnswer(rows_csv=body) if wants_csv else TelemetryAnswer(rows_json=body)

    async def _alerts(self, asked: TelemetryQuery) -> TelemetryAnswer:
        answer = await self.answer(TelemetryQuery(name=_CONDITIONS, params=asked.params))
        if answer.error:
            return answer
        now_s = time.time()
        alerts = [
            alert_of(
                AlertCondition(
                    name=row.alert,
                    subject=row.subject,
                    value=row.value,
                    bound=row.bound,
                    holds=row.is_over == 1,
                ),
                row.since_s,
                now_s,
            )
            for row in self._seen.decode(answer.rows_json)
        ]
        return TelemetryAnswer(rows_json=msgspec.json.encode([*alerts, *self._own_alerts()]))


# A spreadsheet reads a cell with this beginning as a formula, and anyone can choose a user name.
_FORMULA = re.compile(r"[=+\-@\t\r]")
_NUMBER = re.compile(r"[+-]?\d+(\.\d+)?([eE][+-]?\d+)?\Z")


def csv_of(lines: bytes) -> bytes:
    """Convert ClickHouse's JSONCompactEachRowWithNames to CSV: the names of the columns, then the
    rows.

    NULL is an empty cell; an array is JSON in its cell. Text that a spreadsheet would read as a
    formula gets an apostrophe before it.
    """
    text = io.StringIO()
    writer = csv.writer(text)
    for line in lines.splitlines():
        writer.writerow([_cell(value) for value in msgspec.json.decode(line)])
    return text.getvalue().encode()


def harmless(text: str) -> str:
    """Return a cell's text, with an apostrophe before it if a spreadsheet would read it as a
    formula."""
    return f"'{text}" if _FORMULA.match(text) and not _NUMBER.match(text) else text


def _cell(value: Any) -> object:
    match value:
        case None:
            return ""
        case bool():
            return int(value)
        case str():
            return harmless(value)
        case int() | float():
            return value
        case _:
            return msgspec.json.encode(value).decode()

"""Endpoint ``/ops/api``: saved queries over all requests, for administrators, as JSON or CSV, and
the state of alerts.
"""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from millrace.bus.fleet.rollouts import RolloutStore
from millrace.gateway.api.rest import RestApi
from millrace.gateway.core import Gateway
from millrace.gateway.errors import NotFoundError, TelemetryUnavailableError
from millrace.runtime.alerts.rules import RULES
from millrace.runtime.alerts.watch import Alert, AlertState, unknown_alert
from millrace.runtime.redis.link import RedisUnreachableError, reachable
from millrace.runtime.retry import retry
from millrace.schemas.control import TelemetryAnswer, TelemetryQuery
from millrace.schemas.errors import MillraceError, ParameterError
from millrace.schemas.models.rollouts import RolloutReport

logger = logging.getLogger(__name__)

MAX_EXPORT_ROWS = 100_000
_EXPORT = "requests"
_ALERTS = "alerts"
_ROLLOUTS = "rollouts"
_ABSENT = "MillraceTelemetryAbsent"
# Objectives that are parameters of a query.
_OBJECTIVES = {
    "slo_attainment": ("ttft_ms", "tpot_ms"),
    "slo_budget": ("ttft_ms", "tpot_ms", "target", "window_s"),
    _ALERTS: ("ttft_ms", "target"),
}
_ORDER = {
    AlertState.FIRING: 0,
    AlertState.PENDING: 1,
    AlertState.UNKNOWN: 2,
    AlertState.OK: 3,
}
_PAGE_ROWS = 2_000
_PAUSES_S = (0.5, 0.5)
_RELATIVE = re.compile(r"-[0-9]{1,12}|0")
_JSON = "application/json"
_CSV = "text/csv; charset=utf-8"
_HEADERS = {"cache-control": "no-store", "vary": "accept"}


class QueryFailedError(MillraceError, code="query_failed", http_status=400):
    """Query that the telemetry process could not answer."""


class AnswerTooLargeError(MillraceError, code="answer_too_large", http_status=400):
    """Query with a result larger than one answer may be."""


_ERRORS = {
    kind.code: kind for kind in (NotFoundError, TelemetryUnavailableError, AnswerTooLargeError)
}


class _Count(msgspec.Struct, frozen=True):
    requests: int


class OpsApi(RestApi):
    """Operations endpoints of one gateway."""

    def __init__(self, gateway: Gateway) -> None:
        super().__init__(gateway)
        self._counts = msgspec.json.Decoder(tuple[_Count], strict=False)
        self._told = msgspec.json.Decoder(list[Alert])

    def routes(self) -> list[Route]:
        return [Route("/ops/api/{query}", self.query, methods=["GET"])]

    async def query(self, request: Request) -> Response:
        """Return the rows of a saved query. JSON has 64-bit integers as strings. A name that ends
        in ``.csv``, or a caller that accepts only CSV, gets CSV.

        ``requests.csv`` has each request of a range as a row. ``alerts`` has the state of alerts,
        as this gateway and telemetry see it; ``rollouts`` has the schedulers' reports of rollouts.
        Objectives default to the configuration's values.

        Raises NotFoundError, ParameterError, AnswerTooLargeError, QueryError or
        TelemetryUnavailableError.
        """
        await self._admin(request)
        asked: str = request.path_params["query"]
        name = asked.removesuffix(".csv")
        wants_csv = name != asked or _accepts_only_csv(request)
        params = self._with_objectives(name, _single_values(request))
        if name == _ALERTS and not wants_csv:
            return Response(await self._alerts(params), media_type=_JSON, headers=_HEADERS)
        if name == _ROLLOUTS and not wants_csv:
            return Response(await self._rollouts(), media_type=_JSON, headers=_HEADERS)
        if not wants_csv:
            answer = await self._answer_of(name, params)
            return Response(answer.rows_json, media_type=_JSON, headers=_HEADERS)
        if name == _EXPORT:
            return await self._export(params)
        answer = await self._answer_of(name, params, is_csv=True)
        return Response(answer.rows_csv, media_type=_CSV, headers=_attachment(name))

    def _with_objectives(self, name: str, params: dict[str, str]) -> dict[str, str]:
        slo = self._gateway.slo
        own = {one: str(getattr(slo, one)) for one in _OBJECTIVES.get(name, ())}
        return own | params

    async def _alerts(self, params: dict[str, str]) -> bytes:
        """Return alerts as JSON, firing alerts first. If telemetry does not answer, that is one of
        the alerts, and alerts that only telemetry can evaluate are unknown.
        """
        own, answers = self._gateway.alerts, True
        alerts = own.alerts()
        try:
            alerts += self._told.decode((await self._answer_of(_ALERTS, params)).rows_json)
        except (TelemetryUnavailableError, QueryFailedError) as error:
            answers = not isinstance(error, TelemetryUnavailableError)
            known = {one.name for one in alerts} | {_ABSENT}
            alerts += [unknown_alert(name, error.message) for name in RULES if name not in known]
        alerts += own.note_telemetry(answers=answers)
        alerts.sort(key=lambda one: (_ORDER[one.state], one.severity, one.name, one.subject))
        return msgspec.json.encode(alerts)

    async def _rollouts(self) -> bytes:
        """Return rollout reports as JSON; empty while Redis is unreachable, for which there is an
        alert.
        """
        try:
            reports = await RolloutStore(reachable(self._gateway.redis)).reports()
        except RedisUnreachableError:
            reports = []
        return msgspec.json.encode([_as_row(one) for one in reports])

    async def _export(self, params: dict[str, str]) -> Response:
        """Stream all pages of the range. The end of the range is fixed at the start."""
        fixed: dict[str, str | int | float] = {**params, **self._fixed_range(params)}
        for name in ("rows", "after_us", "after_hash"):
            if name in params:
                raise ParameterError(name, f"{_EXPORT}.csv has no parameter {name!r}.")
        answer = await self._answer_of("requests_count", fixed)
        (count,) = self._counts.decode(answer.rows_json)
        if count.requests > MAX_EXPORT_ROWS:
            raise AnswerTooLargeError(
                f"The range holds {count.requests} requests, and a file takes {MAX_EXPORT_ROWS}. "
                "Choose a shorter range, a tenant, a model or a status; millrace sql has no bound."
            )
        first, page_rows = await self._page(fixed, _PAGE_ROWS)
        pages = self._pages(fixed, first, page_rows)
        return StreamingResponse(pages, media_type=_CSV, headers=_attachment(_EXPORT))

    async def _pages(
        self, params: dict[str, str | int | float], page: bytes, page_rows: int
    ) -> AsyncIterator[bytes]:
        """Yield ``page``, of up to ``page_rows`` rows, and the pages after it, with column names
        only once.

        If telemetry does not answer a page within a few tries, the file ends in the middle, without
        the end that HTTP marks, so that clients see it is incomplete.
        """
        num_rows = 0
        names, _, rows = page.partition(b"\r\n")
        yield names + b"\r\n"
        while rows:
            yield rows
            num_rows += page_rows
            if num_rows > 2 * MAX_EXPORT_ROWS:
                raise AnswerTooLargeError("More requests came into the range than a file takes.")
            # The last two columns are numbers, so a cell with a line break cannot be mistaken for
            # them.
            _, after_us, after_hash = rows.rstrip().rsplit(b",", 2)
            following = {**params, "after_us": int(after_us), "after_hash": int(after_hash)}
            page, page_rows = await self._retried_page(following, page_rows)
            rows = page.partition(b"\r\n")[2]

    async def _page(self, params: dict[str, str | int | float], num_rows: int) -> tuple[bytes, int]:
        """Fetch a page of ``num_rows`` rows, or of fewer if an answer cannot hold as many; also
        return the page size.
        """
        while True:
            asked = {**params, "rows": num_rows}
            try:
                answer = await self._answer_of("requests_page", asked, is_csv=True)
            except AnswerTooLargeError:
                if num_rows == 1:
                    raise
                num_rows //= 2
            else:
                return answer.rows_csv, num_rows

    async def _retried_page(
        self, params: dict[str, str | int | float], num_rows: int
    ) -> tuple[bytes, int]:
        try:
            return await retry(
                partial(self._page, params, num_rows),
                _PAUSES_S,
                self._gateway.clock.sleep,
                retried=lambda error: isinstance(error, TelemetryUnavailableError),
            )
        except TelemetryUnavailableError:
            logger.warning("an export ended in the middle: telemetry does not answer")
            raise

    async def _answer_of(
        self, name: str, params: dict[str, str | int | float] | dict[str, str], is_csv: bool = False
    ) -> TelemetryAnswer:
        query = TelemetryQuery(name=name, params={**params}, format="csv" if is_csv else "json")
        answer = await self._gateway.bus.control.query_telemetry(
            query, self._gateway.config.telemetry_timeout_s
        )
        if answer is None:
            raise TelemetryUnavailableError("The telemetry process does not answer.")
        if not answer.error:
            return answer
        if answer.code == ParameterError.code:
            raise ParameterError(answer.param, answer.error)
        raise _ERRORS.get(answer.code, QueryFailedError)(answer.error)

    def _fixed_range(self, params: dict[str, str]) -> dict[str, int]:
        """Return the current bounds of the range; telemetry reports invalid bounds."""
        fixed = {}
        for name, default in (("from_s", "-900"), ("to_s", "0")):
            text = params.get(name, default)
            if _RELATIVE.fullmatch(text):
                fixed[name] = int(self._gateway.clock.now_ns() // 10**9) + int(text)
        return fixed


def _as_row(report: RolloutReport) -> dict[str, Any]:
    """Encode a report like a row with 64-bit integers: times in nanoseconds are strings."""
    row: dict[str, Any] = msgspec.to_builtins(report)
    times = {name: str(value) for name, value in row["rollout"].items() if name.endswith("_ns")}
    return {**row, "rollout": row["rollout"] | times}


def _single_values(request: Request) -> dict[str, str]:
    values: dict[str, str] = {}
    for name, value in request.query_params.multi_items():
        if name in values:
            raise ParameterError(f"{name:.60}", f"{name:.60} is given twice.")
        values[name] = value
    return values


def _accepts_only_csv(request: Request) -> bool:
    kinds = [
        kind.partition(";")[0].strip() for kind in request.headers.get("accept", "").split(",")
    ]
    return "text/csv" in kinds and _JSON not in kinds and "*/*" not in kinds


def _attachment(name: str) -> dict[str, str]:
    """Return headers for a download named after the saved query."""
    return {**_HEADERS, "content-disposition": f'attachment; filename="millrace-{name}.csv"'}

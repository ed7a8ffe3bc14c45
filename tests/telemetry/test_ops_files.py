"""``/ops/api`` over a gateway and a real store: JSON, CSV, and exports of many requests."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from decimal import Decimal

import httpx
import msgspec
import pytest

from millrace.gateway.api import ops as ops_api
from millrace.schemas.control import TelemetryAnswer, TelemetryQuery
from millrace.telemetry.http.answers import SavedQueryAnswers
from millrace.telemetry.store.store import Store
from millrace.telemetry.store.tables import REQUESTS
from tests.support.running_gateway import running_gateway
from tests.telemetry.records import request_record
from tests.telemetry.traffic import fill_month

_ROWS = 5_000


@dataclass
class Endpoint:
    """Client of a gateway whose telemetry answers at most ``num_answers`` queries, if set."""

    http: httpx.AsyncClient
    answers: SavedQueryAnswers
    num_answers: int | None = None
    asked: list[TelemetryQuery] = field(default_factory=list)

    async def answer(self, query: TelemetryQuery) -> TelemetryAnswer:
        self.asked.append(query)
        if self.num_answers is not None and len(self.asked) > self.num_answers:
            return TelemetryAnswer(error="busy", code="telemetry_unavailable")
        return await self.answers.answer(query)

    async def rows(self, path: str, **params: str | int) -> list[dict[str, str]]:
        answer = await self.http.get(path, params=params)
        assert answer.status_code == 200, answer.text
        return list(csv.DictReader(io.StringIO(answer.text, newline="")))


@pytest.fixture
async def endpoint(store: Store) -> AsyncIterator[Endpoint]:
    async with running_gateway() as front, httpx.AsyncClient(base_url=front.url) as http:
        made = Endpoint(http, SavedQueryAnswers(store.reader))
        subscription = await front.worker.bus.control.serve_telemetry(made.answer)
        yield made
        await subscription.close()


async def test_csv_says_what_json_says(store: Store, endpoint: Endpoint) -> None:
    await fill_month(store, 500)
    params = {"from_s": -2_592_000, "step_s": 21_600}
    asked = await endpoint.http.get("/ops/api/cost_by_model", params=params)
    rows = await endpoint.rows("/ops/api/cost_by_model.csv", **params)
    assert rows == [{name: str(value) for name, value in row.items()} for row in asked.json()]
    accepted = await endpoint.http.get(
        "/ops/api/cost_by_model", params=params, headers={"accept": "text/csv"}
    )
    assert accepted.headers["content-type"] == "text/csv; charset=utf-8"
    assert accepted.text.startswith("t,model,currency,cost,")
    assert accepted.headers["content-disposition"] == (
        'attachment; filename="millrace-cost_by_model.csv"'
    )


async def test_a_cursor_keeps_all_its_digits_in_a_browser(store: Store, endpoint: Endpoint) -> None:
    """Numbers of JavaScript are exact up to 2^53."""
    await fill_month(store, 500)
    params: dict[str, str | int] = {"from_s": -2_592_000, "rows": 100}
    seen: list[str] = []
    while page := (await endpoint.http.get("/ops/api/requests_page", params=params)).json():
        seen += [row["request_id"] for row in page]
        cursor = page[-1]
        assert isinstance(cursor["request_hash"], str)
        assert isinstance(cursor["done_us"], str)
        params |= {"after_us": cursor["done_us"], "after_hash": cursor["request_hash"]}
    assert len(seen) == len(set(seen)) == 500


async def test_an_empty_file_names_its_columns(endpoint: Endpoint) -> None:
    answer = await endpoint.http.get("/ops/api/recent_requests.csv")
    assert answer.text.startswith("request_id,done_at,tenant,")
    assert answer.text.count("\r\n") == 1
    export = await endpoint.http.get("/ops/api/requests.csv")
    assert export.text.startswith("request_id,tenant,key_id,user,")
    assert export.text.count("\r\n") == 1


async def test_what_people_write_stays_in_its_cell(store: Store, endpoint: Endpoint) -> None:
    names = ['=HYPERLINK("http://evil")', 'a,"b"\r\nc', "@SUM(1)", "-1", "é\n", "plain"]
    base = request_record(1)
    records = [
        msgspec.structs.replace(
            base, request_id=f"r-{n}", user=name, done_ns=base.done_ns - (n + 2) * 10**9
        )
        for n, name in enumerate(names)
    ]
    await store.insert(REQUESTS, REQUESTS.to_columns(records, range(len(records))), "names")
    for path in ("/ops/api/recent_requests.csv", "/ops/api/requests.csv"):
        rows = {row["request_id"]: row for row in await endpoint.rows(path, from_s=-86_400)}
        users = [rows[f"r-{n}"]["user"] for n in range(len(names))]
        assert users == ['\'=HYPERLINK("http://evil")', names[1], "'@SUM(1)", "-1", "é\n", "plain"]
        assert Decimal(rows["r-0"]["cost"]) == base.cost


async def test_an_export_has_each_request_once(store: Store, endpoint: Endpoint) -> None:
    await fill_month(store, _ROWS)
    params: dict[str, str | int] = {"from_s": -2_592_000, "tenant": "tenant-7"}
    rows = await endpoint.rows("/ops/api/requests.csv", **params)
    counted = await endpoint.http.get("/ops/api/requests_count", params=params)
    assert len(rows) == int(counted.json()[0]["requests"]) > 50
    endpoint.asked.clear()
    rows = await endpoint.rows("/ops/api/requests.csv", from_s=-2_592_000)
    assert len({row["request_id"] for row in rows}) == len(rows) == _ROWS
    assert [row["done_at"] for row in rows] == sorted(row["done_at"] for row in rows)
    pages = [query for query in endpoint.asked if query.name == "requests_page"]
    assert len(pages) == 4
    assert len({(query.params["from_s"], query.params["to_s"]) for query in pages}) == 1


async def test_an_export_of_too_many_is_refused(
    store: Store, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fill_month(store, 1_000)
    monkeypatch.setattr(ops_api, "MAX_EXPORT_ROWS", 900)
    refused = await endpoint.http.get("/ops/api/requests.csv", params={"from_s": -2_592_000})
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["code"] == "answer_too_large"
    assert "1000 requests, and a file takes 900" in error["message"]


async def test_an_export_that_ends_in_the_middle_does_not_look_whole(
    store: Store, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ops_api, "_PAUSES_S", (0.01, 0.01))
    await fill_month(store, _ROWS)
    endpoint.num_answers = 3
    with pytest.raises(httpx.RemoteProtocolError):
        await endpoint.http.get("/ops/api/requests.csv", params={"from_s": -2_592_000})


@pytest.mark.parametrize(
    ("query", "params", "param", "message"),
    [
        ("totals", {"minutes": "15"}, "minutes", "totals has no parameter 'minutes'"),
        ("totals", {"from_s": "yesterday"}, "from_s", "whole number, got 'yesterday'"),
        ("totals", {"from_s": "1e3"}, "from_s", "whole number"),
        ("totals", {"from_s": "-60", "to_s": "-120"}, "from_s", "before to_s"),
        ("totals", {"from_s": str(1 << 70)}, "from_s", "from -9223372036854775808"),
        ("totals", {"to_s": str(1 << 50)}, "to_s", "Unix time in seconds"),
        ("traffic", {"step_s": "0"}, "step_s", "at least 1"),
        ("traffic", {"from_s": "-2592000", "step_s": "10"}, "step_s", "at least 1297"),
        ("recent_requests", {"rows": "501"}, "rows", "from 0 to 500"),
        ("recent_requests", {"status": "lost"}, "status", "one of done, cancelled"),
        ("request_details", {}, "id", "needs the parameter 'id'"),
        ("totals", {"tenant": "a\0b"}, "tenant", "NUL"),
        ("requests.csv", {"after_us": "1"}, "after_us", "no parameter 'after_us'"),
        ("requests.csv", {"from_s": "x"}, "from_s", "whole number"),
    ],
)
async def test_a_bad_parameter_is_named(
    endpoint: Endpoint, query: str, params: dict[str, str], param: str, message: str
) -> None:
    refused = await endpoint.http.get(f"/ops/api/{query}", params=params)
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert (error["code"], error["param"]) == ("invalid_parameter", param)
    assert message in error["message"]


async def test_unknown_paths_are_not_found(endpoint: Endpoint) -> None:
    for path in ("/ops/api/nothing", "/ops/api/nothing.csv", "/ops/api/requests"):
        refused = await endpoint.http.get(path)
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "not_found")
    twice = await endpoint.http.get("/ops/api/totals?from_s=-60&from_s=-90")
    assert twice.json()["error"]["param"] == "from_s"


async def test_an_answer_that_fits_no_message_is_refused(store: Store, endpoint: Endpoint) -> None:
    await fill_month(store, _ROWS)
    params = {"from_s": -2_592_000, "rows": 5_000}
    refused = await endpoint.http.get("/ops/api/requests_page", params=params)
    assert refused.json()["error"]["code"] == "answer_too_large"


async def test_a_name_is_a_name_whatever_it_looks_like(store: Store, endpoint: Endpoint) -> None:
    base = request_record(1)
    names = ("007", "7", "1e5", "nan", "a\\tb", "a\tb", "a\nb", "a\\", "a'b", "\\N", "é")
    records = [
        msgspec.structs.replace(base, request_id=name, tenant=name, done_ns=base.done_ns - 10**9)
        for name in names
    ]
    await store.insert(REQUESTS, REQUESTS.to_columns(records, range(len(names))), "names")
    for name in names:
        answer = await endpoint.http.get(
            "/ops/api/recent_requests", params={"tenant": name, "from_s": -86_400}
        )
        assert [row["request_id"] for row in json.loads(answer.text)] == [name]


async def test_an_export_of_long_rows_is_whole(store: Store, endpoint: Endpoint) -> None:
    """An answer holds as many rows as fit, for long names of users too."""
    base = request_record(1)
    records = [
        msgspec.structs.replace(
            base, request_id=f"r-{n}", user="u" * 500, session_id="s" * 500, trace_id="f" * 32
        )
        for n in range(2_500)
    ]
    await store.insert(REQUESTS, REQUESTS.to_columns(records, range(len(records))), "long")
    rows = await endpoint.rows("/ops/api/requests.csv", from_s=-86_400 * 2)
    assert {row["request_id"] for row in rows} == {record.request_id for record in records}
    assert len(rows) == len(records)


@pytest.mark.parametrize("from_s", ["-" + "9" * 20, "-" + "9" * 5_000])
async def test_times_without_bounds_are_refused(endpoint: Endpoint, from_s: str) -> None:
    answer = await endpoint.http.get("/ops/api/requests.csv", params={"from_s": from_s})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "from_s"

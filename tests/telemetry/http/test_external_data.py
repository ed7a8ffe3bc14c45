"""Rows that come with a question, as clickhouse-connect, ibis and curl send them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from io import BytesIO
from typing import Any

import httpx
import pyarrow as pa
import pytest
import pytest_asyncio

from millrace.schemas.config import ClickHouseConfig
from millrace.telemetry.http import bodies
from millrace.telemetry.http.interface import HttpInterface
from millrace.telemetry.store.reading import StreamingReader
from millrace.telemetry.store.store import Store
from tests.telemetry.reaching_out import SECRET

CONFIG = ClickHouseConfig(
    username="reader", password="opens the door", analyst_password="opens it half"
)
_FULL = (CONFIG.username, CONFIG.password)
_ANALYST = (CONFIG.analyst_username, CONFIG.analyst_password)
_TEAMS = b"acme\tsearch\nglobex\tmaps\n"
_STRUCTURE = "tenant String, team String"


class Client:
    """Sends a question with tables."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client

    async def ask(
        self,
        sql: str,
        files: dict[str, bytes],
        arguments: dict[str, str] | None = None,
        auth: tuple[str, str] = _FULL,
    ) -> httpx.Response:
        return await self._client.post(
            "/",
            params={"query": sql, **(arguments or {})},
            files={name: (name, data, "application/octet-stream") for name, data in files.items()},
            auth=auth,
        )

    async def text(self, *question: Any, **more: Any) -> str:
        answer = await self.ask(*question, **more)
        assert answer.status_code == 200, answer.text
        return answer.text

    async def refusal(self, *question: Any, **more: Any) -> tuple[str, str]:
        answer = await self.ask(*question, **more)
        assert answer.status_code >= 400, answer.text
        return answer.headers["x-clickhouse-exception-code"], answer.text


@pytest_asyncio.fixture
async def client(store: Store) -> AsyncIterator[Client]:
    assert isinstance(store.reader, StreamingReader)
    transport = httpx.ASGITransport(HttpInterface(store.reader, CONFIG, store.views))
    async with httpx.AsyncClient(transport=transport, base_url="http://clickhouse") as made:
        yield Client(made)


def arrow(**columns: list[Any]) -> bytes:
    """A file of Arrow, as ibis sends a memtable."""
    table = pa.table(columns)
    sink = BytesIO()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


@pytest.mark.parametrize("auth", [_FULL, _ANALYST], ids=["full", "analyst"])
async def test_a_table_comes_with_a_question(client: Client, auth: tuple[str, str]) -> None:
    sql = "SELECT team FROM teams WHERE tenant = {tenant:String}"
    arguments = {"teams_structure": _STRUCTURE, "param_tenant": "globex"}
    assert await client.text(sql, {"teams": _TEAMS}, arguments, auth=auth) == "maps\n"


async def test_tables_have_any_input_format_and_types_alone(client: Client) -> None:
    lines = b'{"tenant":"acme","n":1}\n{"tenant":"globex","n":2}\n'
    files = {"a": arrow(id=[1, 2, 3], name=["x", None, "z"]), "b": lines, "c": b"7,8\n"}
    arguments = {
        "a_structure": "id Nullable(Int64), name Nullable(String)",
        "a_format": "Arrow",
        "b_structure": "`tenant` LowCardinality(String), n Decimal(10, 2)",
        "b_format": "JSONEachRow",
        "c_types": "UInt8, Tuple(UInt8)",
        "c_format": "CSV",
    }
    sql = (
        "SELECT (SELECT groupArray(name) FROM a), (SELECT sum(n) FROM b), "
        "(SELECT (_1, _2) FROM c), (SELECT count() FROM a AS x, a AS y)"
    )
    assert await client.text(sql, files, arguments) == "['x','z']\t3\t(7,(8))\t9\n"


async def test_the_statement_and_all_arguments_may_be_parts_of_the_form(store: Store) -> None:
    """The clients curl -F and clickhouse-connect's form_encode_query_params send such forms."""
    assert isinstance(store.reader, StreamingReader)
    transport = httpx.ASGITransport(HttpInterface(store.reader, CONFIG))
    async with httpx.AsyncClient(transport=transport, base_url="http://clickhouse") as client:
        answer = await client.post(
            "/",
            files={
                "query": (None, "SELECT team FROM teams WHERE tenant = {t:String} FORMAT CSV"),
                "param_t": (None, "acme"),
                "teams_structure": (None, _STRUCTURE),
                "database": (None, "millrace"),
                "teams": ("-", _TEAMS),
            },
            auth=_FULL,
        )
    assert answer.text == '"search"\n'


async def test_a_table_is_gone_with_its_question(client: Client) -> None:
    arguments = {"requests_structure": "a Int8"}
    assert await client.text("SELECT a FROM requests", {"requests": b"5\n"}, arguments) == "5\n"
    code, _ = await client.refusal(
        "SELECT a FROM requests", {"other": b""}, {"other_types": "Int8"}
    )
    assert code == "47"
    names = "SELECT count() FROM system.tables WHERE is_temporary"
    assert await client.text(names, {"t": b""}, {"t_types": "Int8"}) == "1\n"


async def test_no_statement_makes_or_changes_a_temporary_table(client: Client) -> None:
    for sql in (
        "CREATE TEMPORARY TABLE x (a Int8)",
        "INSERT INTO t VALUES (1)",
        "DROP TABLE t",
        "TRUNCATE TABLE t",
        "CREATE VIEW analysts.x AS SELECT * FROM t",
    ):
        await client.refusal(sql, {"t": b"1\n"}, {"t_types": "Int8"})


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ({}, "36"),
        ({"t_structure": "a Int8", "t_types": "Int8"}, "36"),
        ({"t_structure": "a"}, "36"),
        ({"t_structure": "a Int8,"}, "36"),
        ({"t_structure": "a Int8)"}, "36"),
        ({"t_structure": "a Tuple(Int8"}, "36"),
        ({"t_structure": "a Int8 DEFAULT 5"}, "36"),
        ({"t_structure": "a Int8, b String DEFAULT file('{file}')"}, "36"),
        ({"t_structure": "a Int8, b String MATERIALIZED file('{file}')"}, "36"),
        ({"t_structure": "a Int8, b String `ALIAS` file('{file}')"}, None),
        ({"t_structure": "a Int8) ENGINE = File(CSV, '{file}'"}, "36"),
        ({"t_structure": "a Int8; DROP TABLE requests"}, "36"),
        ({"t_structure": "a Int8 -- x"}, None),
        ({"t_structure": "a Nothing"}, None),
        ({"t_types": "Int8, Int8"}, None),
        ({"t_types": "Int8", "t_format": "CSV; SELECT 1"}, "73"),
        ({"t_types": "Int8", "t_format": "Nowhere"}, "73"),
        ({"t_types": "Int8", "t_format": "Arrow"}, None),
    ],
)
async def test_what_is_wrong_with_a_table_is_said(
    client: Client, tmp_path: Any, arguments: dict[str, str], code: str | None
) -> None:
    file = tmp_path / "secret.txt"
    file.write_text(SECRET)
    given = {name: text.replace("{file}", str(file)) for name, text in arguments.items()}
    answer = await client.ask("SELECT * FROM t", {"t": b"1\n"}, given)
    assert SECRET not in answer.text
    if code is not None:
        assert answer.headers["x-clickhouse-exception-code"] == code, answer.text
        assert answer.text.startswith(f"Code: {code}. DB::Exception: ")


async def test_a_name_that_is_none_is_refused(client: Client) -> None:
    for name in ("a b", "a`b", "a.b", "x" * 200):
        code, text = await client.refusal("SELECT 1", {name: b"1\n"}, {f"{name}_types": "Int8"})
        assert (code, "no name of an external table" in text) == ("36", True)


async def test_tables_are_bounded_in_bytes_and_number(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "MAX_EXTERNAL_BYTES", 10_000)
    arguments = {"t_types": "String"}
    assert await client.text("SELECT count() FROM t", {"t": b"1\n" * 4_000}, arguments) == "4000\n"
    code, text = await client.refusal("SELECT count() FROM t", {"t": b"1\n" * 6_000}, arguments)
    assert (code, "more than 10000 bytes" in text) == ("307", True)
    many = {f"t{number}": b"" for number in range(20)}
    code, _ = await client.refusal("SELECT 1", many, {f"{name}_types": "Int8" for name in many})
    assert code == "36"


async def test_a_form_that_is_none_is_refused(store: Store) -> None:
    assert isinstance(store.reader, StreamingReader)
    transport = httpx.ASGITransport(HttpInterface(store.reader, CONFIG))
    async with httpx.AsyncClient(transport=transport, base_url="http://clickhouse") as client:
        for kind, body in (
            ("multipart/form-data", b"x"),
            ("multipart/form-data; boundary=b", b"x"),
            ("multipart/form-data; boundary=b", b"--b\r\n\r\nx\r\n--b--\r\n"),
        ):
            answer = await client.post(
                "/?query=SELECT+1", content=body, headers={"Content-Type": kind}, auth=_FULL
            )
            assert answer.headers["x-clickhouse-exception-code"] == "36", (kind, answer.text)

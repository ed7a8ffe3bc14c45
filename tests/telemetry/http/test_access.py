"""Access to the store's HTTP interface, and the limits of permitted statements."""

from __future__ import annotations

import asyncio
import base64
import socketserver
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import msgspec
import pytest

from millrace.schemas.config import ClickHouseConfig
from millrace.schemas.errors import ConfigError
from millrace.telemetry.http.interface import HttpInterface
from millrace.telemetry.store.embedded_engine import connect
from millrace.telemetry.store.store import Store
from tests.telemetry.reaching_out import REACHING_OUT, SECRET
from tests.telemetry.stores import streaming

CONFIG = ClickHouseConfig(username="reader", password="pä55")
RIGHT = ("reader", "pä55")


def basic(user: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


@pytest.fixture
async def client(store: Store) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(HttpInterface(streaming(store), CONFIG))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8123") as made:
        yield made


class Trap:
    """Listener that counts connections."""

    def __init__(self, server: socketserver.TCPServer) -> None:
        self.port = server.server_address[1]
        self.num_visits = 0


@pytest.fixture
def trap() -> Iterator[Trap]:
    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            made.num_visits += 1

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        made = Trap(server)
        serving = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        serving.start()
        yield made
        server.shutdown()
        serving.join()


@pytest.mark.parametrize(
    ("user", "key", "status"),
    [
        ("reader", "pä55", 200),
        ("reader", "pä5", 403),
        ("reader", "", 403),
        ("default", "pä55", 403),
        ("", "pä55", 403),
        ("", "", 401),
    ],
)
async def test_a_name_and_a_password_are_demanded(
    client: httpx.AsyncClient, user: str, key: str, status: int
) -> None:
    """Credentials are required in each form in which ClickHouse's clients send them."""
    headers = {b"X-ClickHouse-User": user.encode(), b"X-ClickHouse-Key": key.encode()}
    by_header = await client.post("/", content="SELECT 1", headers=headers)
    named = {name: value for name, value in (("user", user), ("password", key)) if value}
    by_address = await client.post("/", params=named, content="SELECT 1")
    authorization = {"Authorization": basic(user, key)} if user or key else {}
    by_basic = await client.get("/", params={"query": "SELECT 1"}, headers=authorization)
    for answer in (by_header, by_address, by_basic):
        assert answer.status_code == status, answer.text
        assert answer.text.startswith("1" if status == 200 else "Code: 516. ")
        assert ("www-authenticate" in answer.headers) == (status == 401)
    assert (await client.get("/ping")).status_code == 200


@pytest.mark.parametrize("header", ["Basic ???", "Basic", "Bearer x", "Basic /w==", "Basic é"])
async def test_credentials_that_make_no_sense_are_none(
    client: httpx.AsyncClient, header: str
) -> None:
    headers = {b"Authorization": header.encode()}
    answer = await client.post("/", content="SELECT 1", headers=headers)
    assert answer.status_code in {401, 403}


def test_without_a_password_nothing_is_served(store: Store) -> None:
    with pytest.raises(ConfigError, match=r"clickhouse\.password"):
        HttpInterface(streaming(store), ClickHouseConfig())


@pytest.mark.parametrize("path", ["/", "/ping"])
async def test_a_page_whose_name_leads_here_reads_nothing(
    client: httpx.AsyncClient, path: str
) -> None:
    """The page is refused with the password too, for every path."""
    for host, status in (
        ("evil.example", 403),
        ("evil.example:8123", 403),
        ("127.0.0.1.evil.example", 403),
        ("[::1", 403),
        ("localhost:8123", 200),
        ("127.0.0.1:8123", 200),
        ("[::1]:8123", 200),
    ):
        answer = await client.get(
            path, params={"query": "SELECT 1"}, headers={"Host": host}, auth=RIGHT
        )
        assert answer.status_code == status, (host, answer.text)


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://127.0.0.1:8123"])
async def test_no_page_of_a_browser_may_ask(client: httpx.AsyncClient, origin: str) -> None:
    answer = await client.post("/", content="SELECT 1", headers={"Origin": origin}, auth=RIGHT)
    assert answer.status_code == 403
    assert "Pages of" in answer.text
    assert "access-control-allow-origin" not in answer.headers


async def test_nothing_reaches_out_of_the_database(
    client: httpx.AsyncClient, store: Store, tmp_path: Path, trap: Trap
) -> None:
    """No statement reads or writes a file, connects to an address or changes data."""
    file, out = tmp_path / "secret.txt", tmp_path / "out"
    file.write_text(f"{SECRET}\n")
    before = await store.rows("SHOW TABLES")
    asked = [
        sql.replace("{file}", str(file))
        .replace("{out}", str(out))
        .replace("{port}", str(trap.port))
        for sql in REACHING_OUT
    ]
    for database in ("millrace", "default"):
        for sql in asked:
            answer = await client.post("/", params={"database": database}, content=sql, auth=RIGHT)
            assert 400 <= answer.status_code < 500, (sql, answer.status_code, answer.text)
            assert answer.text.startswith("Code: "), sql
            assert SECRET not in answer.text, sql
            assert not out.exists(), sql
            assert trap.num_visits == 0, sql
    assert await store.rows("SHOW TABLES") == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["secret.txt"]


async def test_an_analyst_has_a_name_and_a_password_of_its_own(store: Store) -> None:
    config = msgspec.structs.replace(CONFIG, analyst_password="another")
    transport = httpx.ASGITransport(HttpInterface(streaming(store), config))
    async with httpx.AsyncClient(transport=transport, base_url="http://clickhouse") as client:
        for auth, sql, status in (
            (("analyst", "another"), "SELECT count() FROM millrace.requests_once", 200),
            (("analyst", "another"), "SELECT count() FROM millrace.transcripts", 400),
            (("analyst", "another"), "SELECT count() FROM millrace.transcripts_once", 400),
            (RIGHT, "SELECT count() FROM millrace.transcripts", 200),
            (("analyst", RIGHT[1]), "SELECT 1", 403),
            ((RIGHT[0], "another"), "SELECT 1", 403),
        ):
            answer = await client.post("/", content=sql, auth=auth)
            assert answer.status_code == status, (auth, sql, answer.text)
            assert ("ACCESS_DENIED" in answer.text) is (status == 400)
    transport = httpx.ASGITransport(HttpInterface(streaming(store), CONFIG))
    async with httpx.AsyncClient(transport=transport, base_url="http://clickhouse") as client:
        assert (await client.post("/", content="SELECT 1", auth=("analyst", ""))).status_code == 403
    with pytest.raises(ConfigError, match="another name"):
        HttpInterface(
            streaming(store), msgspec.structs.replace(config, analyst_username=config.username)
        )


@pytest.mark.parametrize("value", ["file", "FILE", "x.file", "fi\\x6ce", "`file`", ""])
async def test_a_name_in_a_parameter_reaches_out_no_further(
    client: httpx.AsyncClient, tmp_path: Path, value: str
) -> None:
    file = tmp_path / "secret.txt"
    file.write_text(SECRET)
    answer = await client.post(
        "/",
        params={"param_f": value},
        content=f"SELECT arrayMap({{f:Identifier}}, ['{file}'])",
        auth=RIGHT,
    )
    assert answer.status_code == 400, answer.text
    assert SECRET not in answer.text


async def test_a_name_in_a_parameter_is_a_table(client: httpx.AsyncClient) -> None:
    answer = await client.post(
        "/",
        params={"database": "system", "param_t": "one", "param_what": "what it likes"},
        content="SELECT {what:String} FROM {t:Identifier}",
        auth=RIGHT,
    )
    assert answer.text == "what it likes\n"


async def test_the_engine_itself_refuses_sources_without_any_look_at_the_statement(
    store: Store, store_path: Path, tmp_path: Path, trap: Trap
) -> None:
    """The grants forbid sources on the writing connection too, whose statements are not checked."""
    file = tmp_path / "secret.txt"
    file.write_text(SECRET)
    connection = connect(str(store_path), "millrace")
    try:
        sources = [
            sql
            for sql in REACHING_OUT
            if sql.startswith(
                tuple(
                    f"{verb} {name}('"
                    for verb in ("SELECT * FROM", "DESCRIBE TABLE")
                    for name in ("file", "url", "s3", "remote", "mysql", "postgresql", "hdfs")
                )
            )
        ]
        assert len(sources) > 15
        for sql in sources:
            shown = sql.replace("{file}", str(file)).replace("{port}", str(trap.port))
            with pytest.raises(RuntimeError, match="ACCESS_DENIED"):
                connection.query(shown, "TSV")
    finally:
        connection.close()
    assert trap.num_visits == 0


async def test_an_engine_that_was_open_before_is_not_served(tmp_path: Path) -> None:
    """The engine keeps the user that opened it, who may read everything."""
    script = (
        "import sys, chdb\n"
        "from millrace.telemetry.store.embedded_engine import connect\n"
        "open_to_all = chdb.connect(sys.argv[1])\n"
        "connect(sys.argv[1], 'millrace')\n"
    )
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", script, str(tmp_path / "store")), stderr=asyncio.subprocess.PIPE
    )
    _, error = await process.communicate()
    assert process.returncode == 1
    assert b"OpenEngineError" in error


@pytest.mark.parametrize("form", ["dataframe", "ArrowTable", "DataStore", "Nope", "TSV x", ""])
async def test_a_format_that_is_no_bytes_is_refused(client: httpx.AsyncClient, form: str) -> None:
    params = {"default_format": form}
    answer = await client.post("/", params=params, content="SELECT 1", auth=RIGHT)
    if form:
        assert (answer.status_code, "Unknown format" in answer.text) == (404, True), answer.text
    else:
        assert answer.text == "1\n"

"""The drivers of the tools that analysts use, over the embedded store: JDBC, clickhouse-go, and
ClickHouse's client for Node.js."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

import pytest

from millrace.schemas.config import ClickHouseConfig
from millrace.schemas.records import RequestRecord
from millrace.telemetry.http.interface import HttpServer
from millrace.telemetry.store.store import Store
from tests.clients.packages import installed, need, npm_packages
from tests.telemetry.stores import streaming
from tests.telemetry.traffic import MOVED_ID, fill

_SOURCES = Path(__file__).with_name("drivers")
_USER, _PASSWORD = "reader", "opens the door"
_TABLES = (
    "requests",
    "requests_once",
    "generations",
    "usage_by_minute_once",
    "deliveries",
    "worker_samples_once",
    "prices",
    "transcripts",
    "refusals",
    "workers_by_minute",
)
_READ = {"requests", "requests_once", "generations", "deliveries", "worker_samples_once"}
_COPY = "org.apache.maven.plugins:maven-dependency-plugin:3.8.1:copy-dependencies"
_FAST_JAVA = "-XX:TieredStopAtLevel=1"
_SUM = sum(number + len(str(number)) for number in range(300_000))


@pytest.fixture
async def records(store: Store) -> list[RequestRecord]:
    return await fill(store)


@pytest.fixture
async def address(store: Store, records: list[RequestRecord]) -> AsyncIterator[str]:
    config = ClickHouseConfig(serve_port=0, username=_USER, password=_PASSWORD)
    server = HttpServer(streaming(store), config)
    task = asyncio.create_task(server.run())
    yield server.url.removeprefix("http://")
    server.stop()
    await task


async def said(folder: Path, command: Sequence[str]) -> list[str]:
    """The lines that a program prints."""
    running = await asyncio.create_subprocess_exec(
        *command, cwd=folder, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    output, _ = await running.communicate()
    assert running.returncode == 0, output.decode()[-4000:]
    return output.decode().splitlines()


async def columns_of(store: Store, table: str) -> int:
    """Count the columns of ``SELECT *``."""
    described = await store.rows(f"DESCRIBE TABLE {table}")
    return sum(default != "ALIAS" for _, _, default, *_ in described)


def moved(records: list[RequestRecord]) -> RequestRecord:
    return next(record for record in records if record.request_id == MOVED_ID)


def _received(record: RequestRecord) -> datetime:
    return datetime.fromtimestamp(record.received_ns // 10**9, UTC).replace(
        microsecond=record.received_ns // 1000 % 10**6
    )


@pytest.mark.slow(reason="starts a Java machine, 5 s of CPU")
@pytest.mark.parametrize("version", ["jdbc", "jdbc_0_6"])
async def test_jdbc_reads_tables_and_what_they_are(
    store: Store, records: list[RequestRecord], address: str, version: str
) -> None:
    need("java", "javac", "mvn")
    folder = installed(
        f"clickhouse-{version}",
        (_SOURCES / version / "pom.xml", _SOURCES / "Driver.java"),
        ("mvn", "-q", "-B", _COPY, "-DoutputDirectory=jars"),
        ("javac", f"-J{_FAST_JAVA}", "-d", "classes", "Driver.java"),
    )
    url = f"jdbc:ch://{address}/millrace"
    command = ("java", _FAST_JAVA, "-cp", "classes:jars/*", "Driver", url, _USER, _PASSWORD)
    lines = await said(folder, (*command, ",".join(_TABLES)))
    answers = dict(line.split("=", 1) for line in lines if not line.startswith("failure="))
    failures = [line.removeprefix("failure=") for line in lines if line.startswith("failure=")]
    assert answers["product"].startswith("ClickHouse 26.")
    known = (answers[name] for name in ("databases", "types", "functions", "valid"))
    assert list(known) == ["true"] * 4
    assert answers["tables"] == "requests:TABLE,requests_once:VIEW"
    declared = await store.rows("SELECT name, type FROM system.columns WHERE table = 'requests'")
    assert answers["columns"] == ";".join(f"{name}:{kind}" for name, kind in declared)
    for table in _TABLES:
        num_columns, num_rows = answers[f"read {table}"].split()
        assert int(num_columns) == await columns_of(store, table), table
        assert int(num_rows) > 0 or table not in _READ, table
    record = moved(records)
    assert answers["cost"] == f"{record.cost:.12f}"
    assert datetime.fromisoformat(answers["received"]) == _received(record)
    assert answers["tokens"] == str(record.prompt_tokens)
    assert answers["tenant"] == record.tenant
    assert [life.worker_id in answers["workers"] for life in record.attempts] == [True]
    assert answers["pairs"] == "{a=b}"
    matching = [each for each in records if each.tenant == "acme" and each.cost >= 0.0001]
    assert answers["prepared"] == f"{len(matching)} it's \\ a\ttab?"
    assert (answers["limited"], answers["sum"]) == ("5", str(_SUM))
    assert "Code: 47. DB::Exception" in failures[0]
    assert "Code: 164. DB::Exception" in failures[1]
    # The driver tells an answer that was cut off, but does not read why.
    assert ("Premature" in failures[2] or "Failed to read" in failures[2], len(failures)) == (
        True,
        3,
    )


@pytest.mark.slow(reason="builds a Go program, 40 s of CPU, and runs it, 3 s")
async def test_clickhouse_go_reads_with_and_without_compression(
    store: Store, records: list[RequestRecord], address: str
) -> None:
    need("go")
    folder = installed(
        "clickhouse-go",
        tuple(_SOURCES / "go" / name for name in ("go.mod", "go.sum", "main.go")),
        ("go", "build", "-o", "program", "."),
    )
    methods = ("none", "lz4", "zstd", "gzip")
    command = ("./program", address, _USER, _PASSWORD, ",".join(_TABLES), *methods)
    lines = await said(folder, command)
    record = moved(records)
    at = _received(record)
    lives = [life.worker_id for life in record.attempts]
    for method in methods:
        answers = [line.split(" ", 1)[1] for line in lines if line.startswith(f"{method} ")]
        assert answers[0] == "version=26.9 UTC"
        read = {
            line.split("=")[0].split()[1]: line.split("=")[1].split()
            for line in answers[1 : len(_TABLES) + 1]
        }
        assert tuple(read) == _TABLES
        for table, (num_columns, num_rows) in read.items():
            # An answer in Native without rows has no block, which would name the columns.
            known = 0 if num_rows == "0" else await columns_of(store, table)
            assert int(num_columns) == known, table
            assert int(num_rows) > 0 or table not in _READ, table
        assert answers[len(_TABLES) + 1 :] == [
            f"row={record.cost.normalize():f} {at:%Y-%m-%d %H:%M:%S.%f} {','.join(lives)}",
            f"typed={record.received_ns // 1000} map[k:v] true [{' '.join(lives)}]",
            f"sum={_SUM} 150000",
            "failure=47",
            "failure=164",
            "failure=395",
        ]


@pytest.mark.slow(reason="starts Node.js, 3 s of CPU")
async def test_node_reads_with_and_without_compression(
    records: list[RequestRecord], address: str
) -> None:
    need("npm")
    packages = npm_packages("clickhouse-js", "@clickhouse/client@1.23.1")
    program = str(_SOURCES / "node" / "ask.mjs")
    url = f"http://{address}"
    lines = await said(packages, ("node", program, str(packages), url, _USER, _PASSWORD))
    record = moved(records)
    row = {
        "request_id": MOVED_ID,
        "cost": f"{record.cost.normalize():f}",
        "workers": [life.worker_id for life in record.attempts],
    }
    for response, coding in (("false", "undefined"), ("true", "gzip")):
        answers = [line.split(" ", 1)[1] for line in lines if line.startswith(f"{response} ")]
        assert answers[:2] == ["ping=true", f"coding={coding}"]
        assert json.loads(answers[2].removeprefix("row=")) == [row]
        # The client does not read why a compressed answer was cut off.
        cut = "395" if response == "false" else "ECONNRESET"
        assert answers[3:] == ["count=300000", "failure=47", f"failure={cut}", "failure=READONLY"]

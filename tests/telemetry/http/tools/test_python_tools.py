"""Analysts' tools in Python, as they are installed, against the store's HTTP interface."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import AsyncIterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import pytest_asyncio

from millrace.schemas.config import ClickHouseConfig
from millrace.telemetry.http.interface import HttpServer
from millrace.telemetry.store.reading import StreamingReader
from millrace.telemetry.store.store import Store
from tests.clients.packages import python_packages
from tests.support.repository import ROOT
from tests.telemetry.books import FIRST_S, fill

_HERE = Path(__file__).parent
_PAGE = (ROOT / "docs" / "analytics-tools.md").read_text(encoding="utf-8")
_TIMEOUT_S = 180.0
_CONNECT = ("clickhouse-connect==1.12.0", "pandas==3.1.1", "pyarrow==26.0.1")
_PACKAGES: dict[str, tuple[str, ...]] = {
    "pandas": _CONNECT,
    "polars": (*_CONNECT, "polars==2.1.0"),
    "duckdb": (*_CONNECT, "duckdb==2.0.1"),
    "ibis": (*_CONNECT, "ibis-framework[clickhouse]==12.0.0", "packaging==26.4"),
    "jupysql": (*_CONNECT, "jupysql==0.11.1", "ipython==9.18.1", "sqlalchemy==2.0.58"),
    "sqlalchemy": ("clickhouse-sqlalchemy==0.3.2", "sqlalchemy==2.0.58"),
    "superset": (
        "apache-superset==6.1.0",
        "clickhouse-connect==1.12.0",
        # Superset leaves open which of them it gets, and breaks with newer ones.
        "flask-caching==2.3.1",
        "cachetools==8.0.2",
    ),
    "dbt": ("dbt-core==1.11.16", "dbt-clickhouse==1.10.3"),
}
_SUPERSET = """
SECRET_KEY = "of a test that keeps nothing, and long enough"
SQLALCHEMY_DATABASE_URI = "sqlite://"
"""
_FIRST = datetime.fromtimestamp(FIRST_S, UTC).replace(tzinfo=None)


@pytest_asyncio.fixture
async def url(store: Store) -> AsyncIterator[str]:
    """The address, with name and password, of a served store with rows."""
    await fill(store)
    assert isinstance(store.reader, StreamingReader)
    config = ClickHouseConfig(serve_port=0, username="reader", password="opens-the-door")
    server = HttpServer(store.reader, config, store.views)
    running = asyncio.create_task(server.run())
    yield server.url.replace("//", f"//{config.username}:{config.password}@")
    server.stop()
    await running


async def run(
    command: tuple[str | Path, ...], folder: Path, more: Mapping[str, str] | None = None
) -> str:
    """Run a program and return its output. Raises AssertionError with its errors if it fails."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=folder,
        env={**environment, "NO_PROXY": "*", **(more or {})},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(_TIMEOUT_S):
        output, errors = await process.communicate()
    assert process.returncode == 0, f"{output.decode()}\n{errors.decode()[-6000:]}"
    return output.decode()


def blocks(heading: str, language: str) -> list[str]:
    """The pieces of code in a section of the page on analytics."""
    section = re.search(
        rf"^### {re.escape(heading)}\n(.*?)(?=^##)", _PAGE, re.DOTALL | re.MULTILINE
    )
    assert section is not None, heading
    return re.findall(rf"```{language}\n(.*?)```", section[1], re.DOTALL)


async def columns_of(store: Store, table: str) -> list[Any]:
    rows = await store.rows(
        "SELECT name FROM system.columns WHERE database = currentDatabase() "
        "AND table = {table:String} ORDER BY position",
        {"table": table},
    )
    return [name for (name,) in rows]


@pytest.mark.slow(reason="starts another program in an environment of its own")
@pytest.mark.parametrize("tool", [tool for tool in _PACKAGES if tool != "dbt"])
async def test_a_tool_answers_what_an_analyst_asks(
    tool: str, url: str, store: Store, tmp_path: Path
) -> None:
    bin_folder = await asyncio.to_thread(python_packages, f"analytics-{tool}", *_PACKAGES[tool])
    more = {}
    if tool == "superset":
        (tmp_path / "config.py").write_text(_SUPERSET)
        more["SUPERSET_CONFIG_PATH"] = str(tmp_path / "config.py")
    output = await run((bin_folder / "python", _HERE / f"with_{tool}.py", url), tmp_path, more)
    answers, _ = json.JSONDecoder().raw_decode(output[output.index('{"databases"') :])
    columns = await columns_of(store, "requests_once")
    assert {"millrace", "analysts", "system"} <= set(answers["databases"])
    assert {"requests_once", "deliveries_once", "prices"} <= set(answers["tables"])
    assert answers["columns"] == columns
    second_day = _FIRST + timedelta(days=1)
    assert answers["hours"] == [[_FIRST.isoformat(), 5], [second_day.isoformat(), 1]]
    assert answers["joined"] == [["acme", 2]]
    assert answers["of_acme"] == 4
    assert answers["wide"] == [6, len(columns)]


@pytest.mark.slow(reason="starts another program in an environment of its own")
@pytest.mark.parametrize(
    ("tool", "heading", "printed"),
    [
        ("pandas", "pandas", "acme"),
        ("polars", "polars", "acme"),
        ("duckdb", "DuckDB", "acme"),
        ("ibis", "ibis", "search"),
        ("sqlalchemy", "SQLAlchemy", "acme"),
    ],
)
async def test_the_lines_of_the_page_run(
    tool: str, heading: str, printed: str, url: str, tmp_path: Path
) -> None:
    bin_folder = await asyncio.to_thread(python_packages, f"analytics-{tool}", *_PACKAGES[tool])
    run_folder = tmp_path / "data" / "run"
    run_folder.mkdir(parents=True)
    (run_folder / "clickhouse.url").write_text(f"{url}\n")
    code = blocks(heading, "python")
    assert code
    for piece in code:
        output = await run((bin_folder / "python", "-W", "ignore", "-c", piece), tmp_path)
        assert printed in output


@pytest.mark.slow(reason="starts another program in an environment of its own")
async def test_dbt_builds_the_page_s_project(url: str, store: Store, tmp_path: Path) -> None:
    bin_folder = await asyncio.to_thread(python_packages, "analytics-dbt", *_PACKAGES["dbt"])
    for text in blocks("dbt", "yaml") + blocks("dbt", "sql"):
        name = re.match(r"(?:#|--) (\S+)\n", text)
        assert name is not None
        file = tmp_path / name[1]
        file.parent.mkdir(exist_ok=True)
        port = urlsplit(url).port
        file.write_text(text.replace("port: 8123", f"port: {port}"))
    more = {
        "CLICKHOUSE_USER": "reader",
        "CLICKHOUSE_PASSWORD": "opens-the-door",
        "DBT_SEND_ANONYMOUS_USAGE_STATS": "false",
    }
    for _ in range(2):
        output = await run((bin_folder / "dbt", "--no-use-colors", "build"), tmp_path, more)
        assert "ERROR=0" in output
        assert "WARN=0" in output
    rows = await store.rows("SELECT tenant, sum(requests) FROM analysts.days GROUP BY 1 ORDER BY 1")
    assert rows == [("acme", 4), ("globex", 2)]
    comments = await store.rows(
        "SELECT comment FROM system.columns WHERE database = 'analysts' AND table = 'days' "
        "AND name = 'day'"
    )
    assert comments == [("The day in which the requests ended, in UTC.",)]
    await run((bin_folder / "dbt", "--no-use-colors", "docs", "generate"), tmp_path, more)
    catalogue = json.loads((tmp_path / "target" / "catalog.json").read_text())
    assert "model.millrace_analytics.days" in catalogue["nodes"]
    (tmp_path / "models" / "wide.sql").write_text(
        "{{ config(materialized='table') }} select 1 as a"
    )
    with pytest.raises(AssertionError, match="Views in the database analysts may be changed"):
        await run((bin_folder / "dbt", "--no-use-colors", "run", "-s", "wide"), tmp_path, more)
    for view in ("days", "tenants"):
        assert store.views is not None
        await store.views.run(f"DROP VIEW analysts.{view}", None)

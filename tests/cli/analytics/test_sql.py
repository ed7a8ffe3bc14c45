"""``millrace sql``: rows in three forms, over HTTP and straight from the store."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from millrace.cli.analytics.rows import parse_rows, render
from millrace.cli.endpoints import locate
from millrace.cli.main import main
from millrace.runtime.text_table import one_line
from millrace.schemas.config import NatsConfig
from millrace.schemas.errors import MillraceError

ANSWER = b"""{
"meta": [{"name": "model", "type": "LowCardinality(String)"},
         {"name": "n", "type": "UInt64"},
         {"name": "cost", "type": "Nullable(Decimal(38, 12))"},
         {"name": "tags", "type": "Array(String)"}],
"data": [["demo", 3, 0.000081200000, ["a"]],
         ["\xe4\xbd\xa0\xe5\xa5\xbd, \\"x\\"\\n", "18446744073709551615", null, []]],
"rows": 2}"""
EMPTY = b'{"meta": [{"name": "n", "type": "UInt8"}], "data": [], "rows": 0}'


def test_what_would_turn_a_line_around_is_shown() -> None:
    assert one_line("a\u202e001\u2066 \x1b[31m") == r"a\u202e001\u2066 \x1b[31m"
    assert one_line("\u05e9\u05dc\u05d5\u05dd \U0001f469\u200d\U0001f4bb") == (
        "\u05e9\u05dc\u05d5\u05dd \U0001f469\u200d\U0001f4bb"
    )


def test_table() -> None:
    assert render(parse_rows(ANSWER), "table").splitlines() == [
        "model                           n            cost  tags",
        "-----------  --------------------  --------------  -----",
        'demo                            3  0.000081200000  ["a"]',
        '你好, "x"\\n  18446744073709551615            NULL  []',
        "(2 rows)",
    ]
    assert render(parse_rows(EMPTY), "table") == "n\n-\n(0 rows)\n"


def test_json_is_a_list_of_objects_with_every_digit() -> None:
    text = render(parse_rows(ANSWER), "json")
    assert json.loads(text) == [
        {"model": "demo", "n": 3, "cost": 0.0000812, "tags": ["a"]},
        {"model": '你好, "x"\n', "n": 2**64 - 1, "cost": None, "tags": []},
    ]
    assert "0.000081200000" in text
    assert list(json.loads(text)[0]) == ["model", "n", "cost", "tags"]
    assert json.loads(render(parse_rows(EMPTY), "json")) == []


def test_csv() -> None:
    assert render(parse_rows(ANSWER), "csv") == (
        'model,n,cost,tags\ndemo,3,0.000081200000,"[""a""]"\n'
        '"你好, ""x""\n",18446744073709551615,,[]\n'
    )


def test_huge_and_tiny_numbers_stay_short() -> None:
    answer = b'{"meta": [{"name": "x", "type": "Float64"}], "data": [[1e300], [8.5e-7], [2.50]]}'
    shown = render(parse_rows(answer), "csv")
    assert shown == "x\n1E+300\n0.00000085\n2.50\n"


def test_integers_beyond_json_stay_text() -> None:
    answer = b'{"meta": [{"name": "n", "type": "UInt128"}], "data": [[18446744073709551616]]}'
    assert json.loads(render(parse_rows(answer), "json")) == [{"n": "18446744073709551616"}]


@pytest.mark.parametrize("answer", [b"", b"Ok.\n", b'{"data": []}', b"[]"])
def test_an_answer_that_is_no_table_is_an_error(answer: bytes) -> None:
    with pytest.raises(MillraceError, match="not JSONCompact"):
        parse_rows(answer)


class Handler(BaseHTTPRequestHandler):
    """A ClickHouse that knows one query."""

    def do_POST(self) -> None:
        self.server.seen = (  # type: ignore[attr-defined]
            parse_qs(urlsplit(self.path).query),
            self.rfile.read(int(self.headers["Content-Length"])).decode(),
            self.headers["X-ClickHouse-User"],
        )
        known = self.server.seen[1] == "SELECT 1"  # type: ignore[attr-defined]
        self.send_response(200 if known else 404)
        self.end_headers()
        self.wfile.write(ANSWER if known else b"Code: 60. DB::Exception: Unknown table x.\n")

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (the base's name)
        """Quiet."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadingHTTPServer]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        monkeypatch.setenv(
            "MILLRACE_CLICKHOUSE__URL", f"http://127.0.0.1:{server.server_address[1]}"
        )
        yield server
        server.shutdown()
        thread.join()


def test_over_http(
    server: ThreadingHTTPServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sql", "SELECT 1;", "--data", str(tmp_path), "--format", "csv"]) == 0
    assert capsys.readouterr().out.startswith("model,n,cost,tags\n")
    parameters, sql, user = server.seen  # type: ignore[attr-defined]
    assert sql == "SELECT 1"
    assert user == "default"
    assert parameters["readonly"] == ["1"]
    assert parameters["database"] == ["millrace"]


def test_what_the_engine_refuses_is_exit_code_1(
    server: ThreadingHTTPServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sql", "SELECT * FROM x", "--data", str(tmp_path)]) == 1
    shown = capsys.readouterr()
    assert shown.err == "millrace sql: Code: 60. DB::Exception: Unknown table x.\n"
    assert shown.out == ""


def test_nothing_there_at_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sql", "SELECT 1", "--data", str(tmp_path)]) == 2
    assert "nothing runs on" in capsys.readouterr().err


def test_a_server_that_is_named_is_asked_and_no_other(
    server: ThreadingHTTPServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The system that runs on the folder and the store in the folder are not asked."""
    (tmp_path / "clickhouse").mkdir()
    write_endpoints(tmp_path, clickhouse="http://127.0.0.1:9")
    assert main(["sql", "SELECT 1", "--data", str(tmp_path)]) == 0
    assert server.seen[1] == "SELECT 1"  # type: ignore[attr-defined]
    monkeypatch.setenv("MILLRACE_CLICKHOUSE__URL", "http://127.0.0.1:10")
    assert main(["sql", "SELECT 1", "--data", str(tmp_path)]) == 2
    assert "no ClickHouse answers at http://127.0.0.1:10" in capsys.readouterr().err


def test_where_a_system_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An argument comes first, then a variable, the system on the folder, and the defaults."""
    default = locate(tmp_path)
    assert default.nats.url == NatsConfig().url
    write_endpoints(tmp_path, nats="nats://here:1", redis="redis://here:2", kafka="here:3")
    found = locate(tmp_path)
    assert (found.nats.url, found.redis.url) == ("nats://here:1", "redis://here:2")
    assert found.kafka.bootstrap_servers == "here:3"
    monkeypatch.setenv("MILLRACE_NATS__URL", "nats://named:4")
    named = locate(tmp_path)
    assert (named.nats.url, named.redis.url) == ("nats://named:4", "redis://here:2")
    assert locate(tmp_path, "nats://argued:5").nats.url == "nats://argued:5"


def write_endpoints(data: Path, **addresses: str) -> None:
    """Write the endpoints file of a running system, as ``millrace up`` does."""
    (data / "run").mkdir(exist_ok=True)
    endpoints = dict.fromkeys(("http", "nats", "redis", "kafka", "clickhouse"), "") | addresses
    (data / "run" / "endpoints.json").write_text(json.dumps(endpoints))


def test_straight_from_the_store_that_a_system_left(tmp_path: Path) -> None:
    """Every command has its own process because the engine holds a store until its process ends."""
    script = (
        "import sys, chdb\n"
        "store = chdb.connect(sys.argv[1])\n"
        "store.query('CREATE DATABASE millrace')\n"
        "store.query('CREATE TABLE millrace.t (n UInt64) ENGINE = MergeTree ORDER BY n')\n"
        "store.query('INSERT INTO millrace.t VALUES (1), (18446744073709551615)')\n"
        "store.close()\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "clickhouse")], check=True)
    # The address of a system that was killed.
    write_endpoints(tmp_path, clickhouse="http://127.0.0.1:9")

    def sql(query: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "millrace.cli", "sql", query, "--format", "json"]
        return subprocess.run(
            [*command, "--data", str(tmp_path)], capture_output=True, text=True, check=False
        )

    asked = sql("SELECT n FROM t ORDER BY n")
    assert (asked.returncode, asked.stderr) == (0, "")
    assert json.loads(asked.stdout) == [{"n": 1}, {"n": 2**64 - 1}]
    refused = sql("SELECT nonsense FROM t")
    assert refused.returncode == 1
    assert "nonsense" in refused.stderr
    assert "Traceback" not in refused.stderr

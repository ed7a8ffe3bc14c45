"""Commands that ask the store while a system starts, runs, ends or was killed: they ask its
telemetry, and open the folder once no process has it."""

from __future__ import annotations

import fcntl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from millrace.cli.analytics import store
from millrace.cli.main import main
from millrace.cli.running import own_line
from millrace.telemetry.store.store_folder import is_taken
from tests.cli.analytics.test_sql import write_endpoints
from tests.support.waiting import eventually

_ANSWER = b'{"meta": [{"name": "one", "type": "UInt8"}], "data": [[1]]}'
_SQL = ("sql", "SELECT 1 AS one", "--format", "csv", "--data")


class Telemetry(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(_ANSWER)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (the base's name)
        """Quiet."""


@pytest.fixture
def telemetry() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Telemetry) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder of which this process is the ``millrace up``."""
    (tmp_path / "clickhouse").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "up.pid").write_text(own_line())
    return tmp_path


class Naps:
    """Replacement of ``time.sleep`` that runs ``meanwhile``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[], None]) -> None:
        self.num = 0
        self._meanwhile = meanwhile
        monkeypatch.setattr(time, "sleep", self.nap)

    def nap(self, _seconds: float) -> None:
        self.num += 1
        if self.num == 3:
            self._meanwhile()


def test_a_system_that_starts_is_waited_for(
    data: Path,
    telemetry: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(store, "_SILENT_S", 0.0)
    naps = Naps(monkeypatch, lambda: write_endpoints(data, clickhouse=telemetry))
    assert main([*_SQL, str(data)]) == 0
    shown = capsys.readouterr()
    assert shown.out == "one\n1\n"
    assert shown.err == f"millrace: waiting for the system on {data} to answer\n"
    assert naps.num == 3
    assert not list((data / "clickhouse").iterdir()), "the folder was left alone"


def test_telemetry_that_does_not_listen_yet_is_waited_for(
    data: Path,
    telemetry: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_endpoints(data, clickhouse="http://127.0.0.1:9")
    Naps(monkeypatch, lambda: write_endpoints(data, clickhouse=telemetry))
    assert main(["usage", "--from", "2026-01-01", "--format", "csv", "--data", str(data)]) == 0
    assert capsys.readouterr().out == "one\n1\n"


@pytest.mark.parametrize("command", [_SQL, ("migrate", "--dry-run", "--data")])
def test_waiting_for_a_system_ends_with_an_error(
    data: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: tuple[str, ...],
) -> None:
    monkeypatch.setattr(store, "_WAIT_S", 0.1)
    assert main([*command, str(data)]) == 2
    error = capsys.readouterr().err
    assert f"the system on {data} did not answer within" in error
    assert "millrace status" in error


def test_a_system_is_not_asked_at_the_address_of_another(
    data: Path,
    telemetry: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(store, "_WAIT_S", 0.1)
    monkeypatch.setenv("MILLRACE_CLICKHOUSE__PATH", str(data / "clickhouse"))
    monkeypatch.setenv("MILLRACE_CLICKHOUSE__SERVE_PORT", telemetry.rpartition(":")[2])
    assert main([*_SQL, str(data)]) == 2
    assert f"the system on {data} did not answer within" in capsys.readouterr().err


def test_an_owner_that_was_killed_is_not_waited_for(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The dead owner's pid belongs to another process and its address to another server."""
    (data / "run" / "up.pid").write_text("1 1\n")
    write_endpoints(data, clickhouse="http://127.0.0.1:9")
    monkeypatch.setattr(store, "ask_embedded", lambda *_: b"from the folder")
    Naps(monkeypatch, lambda: pytest.fail("waited"))
    assert store.ask("SELECT 1", data) == b"from the folder"


def test_a_system_that_ends_leaves_the_folder(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``millrace up`` takes its addresses away first, and its pid at the end."""
    monkeypatch.setattr(store, "ask_embedded", lambda *_: b"from the folder")
    naps = Naps(monkeypatch, lambda: (data / "run" / "up.pid").unlink())
    assert store.ask("SELECT 1", data) == b"from the folder"
    assert naps.num == 3


def test_another_command_that_reads_the_folder_is_waited_for(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (data / "run" / "up.pid").unlink()
    (data / "clickhouse" / "status").write_text("PID: 1\n")
    monkeypatch.setattr(store, "ask_embedded", lambda *_: b"from the folder")
    with (data / "clickhouse" / "status").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        naps = Naps(monkeypatch, lambda: fcntl.flock(held, fcntl.LOCK_UN))
        assert store.ask("SELECT 1", data) == b"from the folder"
    assert naps.num == 3


def test_telemetry_without_a_millrace_up_is_asked_at_its_address(
    tmp_path: Path, telemetry: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "store"
    folder.mkdir()
    (folder / "status").write_text("PID: 1\n")
    monkeypatch.setenv("MILLRACE_CLICKHOUSE__PATH", str(folder))
    monkeypatch.setenv("MILLRACE_CLICKHOUSE__SERVE_PORT", telemetry.rpartition(":")[2])
    with (folder / "status").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert store.ask("SELECT 1", tmp_path / "data") == _ANSWER


async def test_the_engine_itself_locks_the_folder(tmp_path: Path) -> None:
    """The holder has its own process because the engine holds a store until its process ends."""
    folder = tmp_path / "clickhouse"
    script = "import sys, chdb; it = chdb.connect(sys.argv[1]); print('open', flush=True); input()"
    holder = subprocess.Popen(
        [sys.executable, "-c", script, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"open\n"
    assert is_taken(folder)
    holder.kill()
    holder.communicate()
    await eventually(lambda: not is_taken(folder))


def test_a_folder_without_tables_says_so(tmp_path: Path) -> None:
    """The command has its own process because the engine holds a store until its process ends."""
    (tmp_path / "clickhouse").mkdir()
    command = [sys.executable, "-m", "millrace.cli", *_SQL, str(tmp_path)]
    began_s = time.monotonic()
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 2
    assert "has no database millrace so far: no telemetry has run on it" in ran.stderr
    assert time.monotonic() - began_s < store._WAIT_S

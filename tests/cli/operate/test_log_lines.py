"""Lines of logs: their times, the last lines, and lines added while a command follows them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from millrace.cli.local.log_files import bound_logs
from millrace.cli.local.supervisor import Supervisor
from millrace.cli.main import main
from millrace.cli.operate.log_lines import Follower, last_lines, readable, time_of
from millrace.cli.running import Supervising, lasting, own_line, started_ticks, supervising


def _line(second: int, message: str, **extra: object) -> str:
    time = f"2026-11-25T10:00:{second:02}.000+00:00"
    return json.dumps({"time": time, "level": "info", "message": message, **extra}).replace(
        '": ', '":'
    )


def _moment(second: int) -> float:
    return datetime(2026, 11, 25, 10, 0, second, tzinfo=UTC).timestamp()


def test_each_kind_of_line_tells_its_time() -> None:
    local = datetime(2026, 11, 25, 12, 41, 2, 500_000).timestamp()  # noqa: DTZ001 (as servers do)
    assert time_of(_line(3, "x").encode()) == _moment(3)
    assert time_of(b"[812] 2026/11/25 12:41:02.500000 [INF] Starting nats-server") == local
    assert time_of(b"99:C 25 Nov 2026 12:41:02.500 * Ready to accept connections") == local
    for odd in (b"", b"Traceback (most recent call last):", b'{"time":"soon"}', b"\xff\xfe"):
        assert time_of(odd) is None


def test_the_last_lines_go_on_in_the_older_file(tmp_path: Path) -> None:
    log = tmp_path / "part.log"
    log.write_text("".join(_line(second, "x" * 30_000) + "\n" for second in range(6)))
    bound_logs(tmp_path, most_bytes=10)
    assert log.read_text() == ""
    log.write_text(_line(6, "new") + "\n  its second line\n" + _line(7, "unfinished"))
    found = last_lines(log, 4, 0.0)
    assert [line.time_s for line in found] == [_moment(s) for s in (5, 6, 6, 7)]
    assert found[2].text == "  its second line"
    assert len(last_lines(log, None, 0.0)) == 9
    assert len(last_lines(log, None, _moment(5))) == 4
    assert last_lines(log, None, _moment(59)) == []


def test_a_log_within_its_bound_stays(tmp_path: Path) -> None:
    (tmp_path / "part.log").write_text("short\n")
    bound_logs(tmp_path, most_bytes=100)
    assert [file.name for file in tmp_path.iterdir()] == ["part.log"]


def test_what_is_added_is_followed_past_a_move(tmp_path: Path) -> None:
    log = tmp_path / "part.log"
    log.write_text("before\n")
    follower = Follower(log)
    with log.open("a") as opened:
        opened.write("one\ntw")
    assert [line.text for line in follower.new_lines()] == ["one"]
    with log.open("a") as opened:
        opened.write("o\n")
    assert [line.text for line in follower.new_lines()] == ["two"]
    bound_logs(tmp_path, most_bytes=1)
    with log.open("a") as opened:
        opened.write("3\n")
    assert [line.text for line in follower.new_lines()] == ["3"]
    assert follower.new_lines() == []


def test_a_line_for_a_person(tmp_path: Path) -> None:
    log = tmp_path / "worker-1.log"
    log.write_text(_line(3, "a worker joined", level="warning", model="demo", sizes=[1]) + "\n")
    shown = readable(last_lines(log, 1, 0.0)[0], 10)
    assert shown.endswith("worker-1    WARNING a worker joined  model=demo sizes=[1]")


def test_logs_are_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["logs", "--data", str(tmp_path)]) == 2
    assert "there are no logs in" in capsys.readouterr().err
    Supervisor(tmp_path / "run", tmp_path / "logs")
    (tmp_path / "logs" / "up.log").write_text(_line(1, "hello \x1b[31m") + "\nplain \x1b[31m\n")
    assert main(["logs", "-n", "-1", "--data", str(tmp_path)]) == 2
    assert "-n must not be negative" in capsys.readouterr().err
    assert main(["logs", "up", "-n", "1", "--follow", "--data", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert shown.splitlines() == [shown.splitlines()[0]]
    assert shown.endswith("up  plain \\x1b[31m\n")  # nothing there commands the terminal


# --- whose pid it is ---


def test_a_pid_that_another_process_has_by_now_is_not_signalled(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    file = tmp_path / "run" / "up.pid"
    other = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    try:
        file.write_text(f"{other.pid} 1\n")
        assert supervising(tmp_path) is None
        assert main(["down", "--data", str(tmp_path)]) == 0
        assert Supervising(other.pid, 1).terminate(0.0)  # the supervised process has ended
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_down_waits_as_long_as_it_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The process ignores the first SIGTERM and ends at the second."""
    (tmp_path / "run").mkdir()
    program = (
        "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM]);"
        "print(flush=True); signal.sigwait([signal.SIGTERM]);"
        "print(flush=True); signal.sigwait([signal.SIGTERM])"
    )
    stubborn = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    try:
        assert stubborn.stdout is not None
        stubborn.stdout.readline()
        (tmp_path / "run" / "up.pid").write_text(f"{stubborn.pid} {started_ticks(stubborn.pid)}\n")
        assert main(["down", "--wait", "50ms", "--data", str(tmp_path)]) == 1
        assert "It still runs after 0 s" in capsys.readouterr().out
        assert main(["status", "--data", str(tmp_path)]) == 1
        assert "is just starting or stopping" in capsys.readouterr().out
        assert main(["status", "--json", "--data", str(tmp_path)]) == 1
        assert json.loads(capsys.readouterr().out)["well"] is False
        stubborn.stdout.readline()  # It has taken the first signal, so the second one is new.
        assert main(["down", "--data", str(tmp_path)]) == 0
        assert "Stopped in" in capsys.readouterr().out
    finally:
        stubborn.kill()
        stubborn.communicate()


def test_status_reports_a_killed_system(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run").mkdir()
    for odd in ("", "12", "x y", "1 2 3", "999999999 1"):
        (tmp_path / "run" / "up.pid").write_text(odd)
        assert supervising(tmp_path) is None
    (tmp_path / "run" / "endpoints.json").write_text("{}")
    assert main(["status", "--data", str(tmp_path)]) == 3
    assert "The system there was killed" in capsys.readouterr().out
    assert main(["status", "--json", "--data", str(tmp_path)]) == 3
    assert json.loads(capsys.readouterr().out) == {"state": "not running", "well": False}


def test_the_pid_line_names_this_process(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "up.pid").write_text(own_line())
    found = supervising(tmp_path)
    assert found is not None
    assert found.pid == os.getpid()
    assert 0.0 < found.up_s < 86_400.0


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "0 s"),
        (59.0, "59 s"),
        (200.0, "3 min 20 s"),
        (7_500.0, "2 h 5 min"),
        (86_400.0, "1 d"),
    ],
)
def test_lengths_of_time(seconds: float, text: str) -> None:
    assert lasting(seconds) == text

"""``millrace up`` itself: ports, files, refusals, an orderly end, and a second life."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.clients import ask_sse
from tests.support.system import FOREIGN_VARIABLES, System
from tests.support.waiting import eventually

pytestmark = pytest.mark.e2e


def _cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "millrace.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=60.0,
        check=False,
        env=os.environ | FOREIGN_VARIABLES,
    )


def test_the_files_that_others_read_are_there(system: System) -> None:
    endpoints = json.loads((system.data / "run" / "endpoints.json").read_text())
    assert set(endpoints) == {"http", "nats", "redis", "kafka", "clickhouse"}
    running = {process.pid for process in system.processes()}
    for part in (
        *("nats", "redis", "kafka", "telemetry-1"),
        *("scheduler-1", "worker-1", "gateway-1"),
    ):
        assert system.pid(part) in running
        assert (system.data / "logs" / f"{part}.log").is_file()


def test_a_second_one_on_the_same_folder_is_refused(system: System) -> None:
    second = _cli("up", "--data", str(system.data))
    assert second.returncode == 2
    assert re.search(rf"already runs on .* \(pid \d+, for .*, {system.http}\)", second.stderr)


def test_an_unknown_model_is_refused_by_name(tmp_path: Path) -> None:
    refused = _cli("up", "--data", str(tmp_path), "--model", "no-such-model")
    assert refused.returncode == 2
    assert "no-such-model" in refused.stderr
    assert "demo" in refused.stderr


def test_sql_reads_the_running_store(system: System) -> None:
    rows = _cli(
        *("sql", "SELECT 1 AS one, 'a' AS letter"),
        *("--data", str(system.data), "--format", "json"),
    )
    assert rows.returncode == 0, rows.stderr
    assert json.loads(rows.stdout) == [{"one": 1, "letter": "a"}]
    refused = _cli("sql", "DROP TABLE requests", "--data", str(system.data))
    assert refused.returncode != 0


def test_other_commands_reach_the_running_system(system: System) -> None:
    """Commands reach the system if the shell has proxy variables."""
    where = ("--data", str(system.data))
    used = _cli("usage", "--from", "2020-01-01", "--format", "json", *where)
    assert used.returncode == 0, used.stderr
    assert json.loads(used.stdout)["from"].startswith("2020-01-01")
    migrations = _cli("migrate", "--dry-run", *where)
    assert migrations.returncode == 0, migrations.stderr
    assert "are up to date" in migrations.stdout
    status = _cli("status", *where)
    assert status.returncode == 0, status.stdout
    top = _cli("top", "--once", *where)
    assert "No figures of telemetry" not in top.stdout


def test_publish_streams_and_fetches_later(system: System) -> None:
    ask = ("publish", "--model", "demo", "--prompt", "What is TTFT?", "--temperature", "0")
    where = ("--data", str(system.data))
    streamed = _cli(*ask, "--stream", *where)
    assert streamed.returncode == 0, streamed.stderr
    assert "first token" in streamed.stdout.lower()
    published = _cli(*ask, "--no-wait", *where)
    assert published.returncode == 0, published.stderr
    request_id = published.stdout.split()[-1]
    deadline = time.monotonic() + 20.0
    fetched = _cli("result", request_id, *where)
    while fetched.returncode != 0 and time.monotonic() < deadline:
        fetched = _cli("result", request_id, *where)
    assert "first token" in fetched.stdout.lower()


def _tells(system: System, query: str, rows: list[dict[str, Any]]) -> bool:
    return system.sql(query) == rows


@pytest.mark.slow(reason="starts two systems; tests/cli/local covers how ports are chosen")
async def test_systems_that_start_at_the_same_moment_have_nothing_in_common(tmp_path: Path) -> None:
    arguments = ("--engine", "simulated")
    systems = [System(tmp_path / name, arguments) for name in ("one", "other")]
    try:
        await asyncio.gather(*(asyncio.to_thread(system.start) for system in systems))
        one, other = (set(system.endpoints.values()) for system in systems)
        assert not one & other
        answers = []
        for system in systems:
            async with httpx.AsyncClient(base_url=system.http, timeout=30.0) as http:
                answers.append(await ask_sse(http, "Whose are you?", max_tokens=4))
        for system, answer in zip(systems, answers, strict=True):
            query = "SELECT request_id FROM requests FINAL WHERE tenant != 'system'"
            own = [{"request_id": answer.request_id}]
            await eventually(partial(_tells, system, query, own))
    finally:
        for system in systems:
            system.stop()


def test_a_taken_port_that_was_asked_for_is_refused_with_who_has_it(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        refused = _cli("up", "--data", str(tmp_path), "--port", str(port))
    assert refused.returncode == 2
    assert f"gateway: port {port} is taken (pid {os.getpid()}, " in refused.stderr
    assert "--port 0" in refused.stderr


@pytest.mark.slow(reason="starts a system twice; tests/cli/local covers how ports are chosen")
async def test_a_usual_port_that_is_taken_moves_and_a_second_life_keeps_the_records(
    tmp_path: Path,
) -> None:
    with contextlib.ExitStack() as stack:
        taken = stack.enter_context(socket.socket())
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with contextlib.suppress(OSError):  # somebody else may have it
            taken.bind(("127.0.0.1", 8000))
            taken.listen()
        running = System(tmp_path / "data", ("--engine", "simulated")).start()
        try:
            assert "gateway: port 8000 is taken, using " in running.output()
            async with httpx.AsyncClient(base_url=running.http, timeout=30.0) as http:
                answer = await ask_sse(http, "What is TTFT?")
            # Stop at once: the record may still be on its way, and must not be lost.
        finally:
            processes = running.processes()
            began = time.monotonic()
            assert running.stop() == 0
            assert time.monotonic() - began < 10.0
    assert [process for process in processes if process.is_running()] == []
    running.start()
    try:
        query = f"SELECT count() AS n FROM requests FINAL WHERE request_id = '{answer.request_id}'"
        await eventually(lambda: int(running.sql(query)[0]["n"]) == 1)
    finally:
        assert running.stop() == 0

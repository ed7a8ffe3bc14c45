"""Resources of an idle system, by process."""

from __future__ import annotations

import os
import subprocess
import sys

import psutil
import pytest

from benchmarks.support.processes import Reading, read, role_of
from benchmarks.system.idle import idle_of


@pytest.mark.parametrize(
    ("command", "role"),
    [
        (("/usr/bin/python3", "-m", "millrace.telemetry", "--config", "c.yaml"), "telemetry"),
        (
            ("python", "-m", "millrace.workers.process.engine_process", "7"),
            "workers.process.engine_process",
        ),
        (("/opt/nats-server", "--config", "nats.conf"), "nats-server"),
        (("redis-server 127.0.0.1:6380",), "redis-server"),
        ((), "ended"),
    ],
)
def test_role_of_a_process_follows_from_its_command_line(
    command: tuple[str, ...], role: str
) -> None:
    assert role_of(command) == role


def test_what_was_used_between_two_readings() -> None:
    process = psutil.Process(os.getpid())
    idle = idle_of(process, Reading("a", 10.0, 500), Reading("a", 10.3, 800), seconds=30.0)
    assert idle.core_percent == pytest.approx(1.0)
    assert idle.switches_per_s == 10.0
    assert 0 < idle.pss_mib <= idle.rss_mib


def test_a_process_that_has_ended_is_left_out() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        ended = psutil.Process(process.pid)
        process.wait()
    assert set(read([psutil.Process(os.getpid()), ended])) == {os.getpid()}

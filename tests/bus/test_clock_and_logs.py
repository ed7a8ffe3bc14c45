"""Time that tests move, and logs that are one JSON object a line."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator

import pytest

from bus.clock import ManualClock, SystemClock
from bus.logs import configure_logging
from schemas.errors import ConfigError


async def test_sleepers_wake_in_order_at_their_time() -> None:
    clock = ManualClock(now_ns=1_000)
    woken: list[tuple[str, float]] = []

    async def sleeper(name: str, seconds: float) -> None:
        await clock.sleep(seconds)
        woken.append((name, clock.monotonic()))

    tasks = [
        asyncio.ensure_future(sleeper(name, seconds))
        for name, seconds in (("late", 3.0), ("first", 1.0), ("second", 1.0), ("never", 9.0))
    ]
    await clock.advance(0.5)
    assert woken == []
    await clock.advance(4.5)
    assert woken == [("first", 1.0), ("second", 1.0), ("late", 3.0)]
    assert clock.monotonic() == 5.0
    assert clock.now_ns() == 5_000_001_000
    assert clock.num_sleepers == 1
    tasks[3].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert clock.num_sleepers == 0


async def test_a_periodic_task_runs_as_often_as_time_says() -> None:
    clock = ManualClock()
    ticks: list[float] = []

    async def tick() -> None:
        while True:
            await clock.sleep(1.0)
            ticks.append(clock.monotonic())

    task = asyncio.ensure_future(tick())
    await clock.advance(3.5)
    assert ticks == [1.0, 2.0, 3.0]
    task.cancel()


async def test_the_system_clock() -> None:
    clock = SystemClock()
    before = clock.monotonic(), clock.now_ns()
    await clock.sleep(0.01)
    assert clock.monotonic() - before[0] >= 0.009
    assert clock.now_ns() > before[1]


@pytest.fixture
def root_logger() -> Iterator[logging.Logger]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield root
    root.handlers[:] = handlers
    root.setLevel(level)


def test_a_line(root_logger: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("gateway", "info")
    logger = logging.getLogger("gateway.test")
    logger.debug("unseen")
    try:
        json.loads("two\nlines")
    except ValueError:
        logger.exception("it failed: %s", "é", extra={"request_id": "r1", "where": ("a", object)})
    line, rest = capsys.readouterr().err.split("\n", 1)
    assert rest == ""
    read = json.loads(line)
    assert read["component"] == "gateway"
    assert read["level"] == "error"
    assert read["message"] == "it failed: é"
    assert read["request_id"] == "r1"
    assert "Traceback" in read["exception"]
    assert "\n" in read["exception"]


def test_an_unknown_level(root_logger: logging.Logger) -> None:
    with pytest.raises(ConfigError, match="loud"):
        configure_logging("gateway", "loud")

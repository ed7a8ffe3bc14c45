"""Clock that tests move, and logs of one JSON object a line."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.runtime.clock import SystemClock, until_beat_s
from millrace.runtime.logs import configure_logging, stack_of
from millrace.schemas.errors import ConfigError
from tests.support.manual_clock import ManualClock


@given(
    now_s=st.floats(0.0, 1e7, allow_nan=False),
    interval_s=st.sampled_from([0.05, 0.1, 0.25, 0.5, 1.0, 1.5, 2.0, 30.0]),
)
def test_what_is_done_at_one_interval_is_done_together(now_s: float, interval_s: float) -> None:
    clock = ManualClock()
    clock.skip(now_s)
    sleep_s = until_beat_s(clock, interval_s)
    assert interval_s / 8 <= sleep_s <= interval_s * 9 / 8
    share = (now_s + sleep_s) / interval_s
    assert abs(share - round(share)) < 1e-6


def test_no_interval_is_no_rest() -> None:
    assert until_beat_s(ManualClock(), 0.0) == 0.0


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
        logger.exception(
            "it failed: %s", "é\u2028\u0085", extra={"request_id": "r1", "where": ("a", object)}
        )
    (line,) = capsys.readouterr().err.splitlines()
    read = json.loads(line)
    assert read["component"] == "gateway"
    assert read["level"] == "error"
    assert read["message"] == "it failed: é\u2028\u0085"
    assert read["request_id"] == "r1"
    assert "Traceback" in read["exception"]
    assert read["exception"].endswith("\njson.decoder.JSONDecodeError")


def test_what_an_exception_quotes_is_not_logged(
    root_logger: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = "my secret"

    def tokenise(text: str) -> None:
        try:
            dict[str, int]().pop(text)
        except KeyError as error:
            error.add_note(text)
            raise ExceptionGroup(text, [ValueError(text), OSError(errno.ENOSPC, text)]) from error

    configure_logging("gateway", "info")
    try:
        tokenise(prompt)
    except ExceptionGroup as error:
        logging.getLogger("gateway.test").exception("it failed")
        # As the event loop reports a task that was never awaited.
        context = {"message": "never retrieved", "future": repr(error), "exception": error}
        loop = asyncio.new_event_loop()
        loop.default_exception_handler(context)
        loop.close()
    shown = capsys.readouterr().err
    assert prompt not in shown
    logged, logged_by_loop = (json.loads(line) for line in shown.splitlines())
    assert logged_by_loop["message"] == "never retrieved"
    first = logged["exception"]
    assert first == logged_by_loop["exception"]
    assert "in tokenise" in first
    assert [word for word in first.splitlines() if not word.startswith(" ")] == [
        "Traceback (most recent call last):",
        "KeyError",
        "which led to",
        "Traceback (most recent call last):",
        "ExceptionGroup, of",
    ]
    assert "  ValueError" in first
    assert "  OSError: No space left on device" in first


def test_causes_that_go_in_a_circle() -> None:
    first, second = ValueError(), TypeError()
    first.__cause__, second.__cause__ = second, first
    assert stack_of(first).count("which led to") == 1


def test_an_unknown_level(root_logger: logging.Logger) -> None:
    with pytest.raises(ConfigError, match="loud"):
        configure_logging("gateway", "loud")

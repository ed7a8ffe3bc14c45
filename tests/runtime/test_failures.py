"""Failures of long-lived tasks: counted, restarted, and at last the end of the process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import pytest

from millrace.runtime.faults.failures import (
    MAX_FAILURES,
    Failures,
    PartFailedError,
    failures,
    keep_part_running,
    keep_running,
    note_in,
)
from millrace.runtime.metrics_server import monitored, render
from millrace.runtime.tasks import Tasks
from millrace.schemas.config import MetricsConfig
from millrace.schemas.errors import BusUnavailableError, ConfigError
from tests.support.manual_clock import ManualClock


class Noted:
    """Failures on a manual clock, with a note of whether they gave up."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.failures = Failures(self.clock)
        self.num_given_up = 0
        self.failures.on_giving_up = self._give_up
        note_in(self.failures)

    def _give_up(self) -> None:
        self.num_given_up += 1


async def fail_on(error: Exception) -> None:
    raise error


async def test_five_unforeseen_failures_in_a_minute_are_the_end() -> None:
    noted = Noted()
    error = RuntimeError("the handler is closed")
    task = asyncio.create_task(keep_running("loop", lambda: fail_on(error), noted.clock))
    await noted.clock.advance(1.5)  # 0, 0.2, 0.6, 1.4
    assert not noted.failures.trouble
    noted.failures.check()
    await noted.clock.advance(1.6)
    assert "loop" in noted.failures.trouble
    with pytest.raises(PartFailedError, match="loop"):
        noted.failures.check()
    await noted.clock.advance(10)
    assert noted.num_given_up == 1
    task.cancel()


@pytest.mark.parametrize(
    "error",
    [
        BusUnavailableError("away"),
        OSError("away"),
        KeyError("x"),
        ExceptionGroup("", [OSError("away"), ExceptionGroup("", [KeyError("x")])]),
    ],
)
async def test_foreseen_failures_never_end_a_part(error: Exception) -> None:
    noted = Noted()
    run = keep_running("loop", lambda: fail_on(error), noted.clock, foreseen=(KeyError,))
    task = asyncio.create_task(run)
    await noted.clock.advance(300)
    assert not noted.failures.trouble
    task.cancel()


async def test_a_group_with_an_unforeseen_error_is_unforeseen() -> None:
    noted = Noted()
    group = ExceptionGroup("", [OSError("away"), RuntimeError("x")])
    task = asyncio.create_task(keep_running("loop", lambda: fail_on(group), noted.clock))
    await noted.clock.advance(5)
    assert noted.failures.trouble
    task.cancel()


async def test_failures_that_are_far_apart_are_not_the_end() -> None:
    noted = Noted()
    tasks = Tasks()
    tasks.repeat(lambda: fail_on(AttributeError("x")), 16.0, noted.clock, "chore")
    await noted.clock.advance(600)
    assert not noted.failures.trouble
    await tasks.close()


async def test_a_chore_that_fails_each_time_is_counted_too() -> None:
    noted = Noted()
    tasks = Tasks()
    tasks.repeat(lambda: fail_on(AttributeError("x")), 1.0, noted.clock, "chore")
    await noted.clock.advance(10)
    assert noted.num_given_up == 1
    await tasks.close()


async def test_a_part_lives_again_after_it_has_served() -> None:
    noted = Noted()
    lives: list[int] = []

    async def live(note_served: Callable[[], None]) -> None:
        lives.append(len(lives))
        if len(lives) < 3:
            note_served()
            raise RuntimeError("unforeseen") if len(lives) == 1 else BusUnavailableError("away")

    task = asyncio.create_task(keep_part_running("part", live, noted.clock))
    await noted.clock.advance(2)
    await task
    assert lives == [0, 1, 2]


@pytest.mark.parametrize(
    ("error", "serves"),
    [(RuntimeError("at the start"), False), (ConfigError("later"), True)],
)
async def test_a_part_that_cannot_start_or_says_why_it_ends_is_over(
    error: Exception, serves: bool
) -> None:
    async def live(note_served: Callable[[], None]) -> None:
        if serves:
            note_served()
        raise error

    with pytest.raises(type(error)) as caught:
        await keep_part_running("part", live, Noted().clock)
    assert caught.value is error


async def test_failures_are_shown_by_health_and_metrics() -> None:
    async with monitored("worker", MetricsConfig(port=0)) as monitor:
        monitor.trouble = lambda: ""
        assert failures() is monitor.failures
        for _ in range(MAX_FAILURES):
            assert _health_of(monitor.answer(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")) == (
                200,
                "ok",
            )
            failures().note("flusher", RuntimeError("unforeseen"))
        failures().note("bridge", OSError("away"))
        status, told = _health_of(monitor.answer(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"))
        assert status == 503
        assert "flusher" in told
        shown = render(monitor.registry).decode()
    name = "millrace_task_failures_total"
    assert f'{name}{{kind="unforeseen",task="flusher"}} 5.0' in shown
    assert f'{name}{{kind="foreseen",task="bridge"}} 1.0' in shown
    assert "millrace_healthy 0.0" in shown


def _health_of(answer: bytes) -> tuple[int, str]:
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["status"]

"""Ends of processes, in words and as causes of lost workers."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from millrace.bus.worker_losses import cause_of_code, cause_of_text
from millrace.runtime import process
from millrace.runtime.process import how_it_ended, num_oom_kills
from millrace.schemas.records import LossCause


@pytest.mark.parametrize(
    ("code", "words"),
    [(0, "exit code 0"), (3, "exit code 3"), (-9, "signal SIGKILL"), (-35, "signal 35")],
)
def test_words(code: int, words: str) -> None:
    assert how_it_ended(code) == words


def test_a_kill_while_linux_kills_for_memory_is_out_of_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counter = tmp_path / "memory.events"
    monkeypatch.setattr(
        process, "_COUNTERS", ((counter, "oom_kill"), (tmp_path / "no", "oom_kill"))
    )
    assert num_oom_kills() == 0
    counter.write_text("low 0\noom 3\noom_kill 2\noom_group_kill 1\n")
    assert num_oom_kills() == 2
    kill, term = -signal.SIGKILL, -signal.SIGTERM
    assert cause_of_code(kill, 2) == (LossCause.SIGNAL, "SIGKILL")
    assert cause_of_code(kill, 1) == (LossCause.OUT_OF_MEMORY, "SIGKILL")
    assert cause_of_code(term, 1) == (LossCause.SIGNAL, "SIGTERM")
    assert cause_of_code(1, 1) == (LossCause.EXIT, "1")


@pytest.mark.parametrize(
    ("why", "is_oom_kill", "cause"),
    [
        ("the engine's process ended with signal SIGSEGV", False, (LossCause.SIGNAL, "SIGSEGV")),
        ("the engine's process ended with signal SIGSEGV", True, (LossCause.SIGNAL, "SIGSEGV")),
        (
            "the server's process ended with signal SIGKILL",
            True,
            (LossCause.OUT_OF_MEMORY, "SIGKILL"),
        ),
        ("the server's process ended with exit code 2", True, (LossCause.EXIT, "2")),
        (
            "the engine failed: OutOfMemoryError: CUDA out of memory.",
            False,
            (LossCause.OUT_OF_MEMORY, ""),
        ),
        ("the engine failed: ValueError: my secret prompt", False, (LossCause.EXIT, "")),
    ],
)
def test_the_text_of_an_engine_gives_a_cause_and_nothing_else(
    why: str, is_oom_kill: bool, cause: tuple[LossCause, str]
) -> None:
    assert cause_of_text(why, is_oom_kill=is_oom_kill) == cause

"""End of a part's process."""

from __future__ import annotations

import logging

import pytest

from millrace.runtime.process import exit_code_of
from millrace.schemas.errors import (
    BusUnavailableError,
    ConfigError,
    MillraceError,
    ModelNotFoundError,
)


def ending_with(error: Exception) -> int:
    def run() -> None:
        raise error

    return exit_code_of("scheduler", run)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("nats.url is odd."), 2),
        (ModelNotFoundError("There is no model x."), 2),
        (BusUnavailableError("NATS is unreachable."), 1),
    ],
)
def test_an_error_is_one_sentence_and_a_code(
    error: MillraceError, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ending_with(error) == code
    assert capsys.readouterr().err == f"scheduler: {error.message}\n"


def test_a_bug_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        assert ending_with(ZeroDivisionError()) == 1
    assert "the process failed" in caplog.text


def test_an_orderly_end() -> None:
    assert exit_code_of("scheduler", lambda: None) == 0

"""Arguments of ``--workers`` and ``--autoscale MIN:MAX``, valid and refused ones."""

from __future__ import annotations

import argparse

import pytest

from millrace.cli.engine_arguments import FirstWorkers, parse_bounds, workers_option
from millrace.schemas.engines import WorkerRole
from millrace.schemas.errors import ConfigError

_PREFILL, _DECODE = WorkerRole.PREFILL, WorkerRole.DECODE


@pytest.mark.parametrize(
    ("text", "workers"),
    [
        ("3", FirstWorkers(3)),
        ("-1", FirstWorkers(-1)),
        ("prefill:1,decode:2", FirstWorkers(3, (_PREFILL, _DECODE, _DECODE))),
        ("both:1", FirstWorkers(1, (WorkerRole.BOTH,))),
    ],
)
def test_workers_are_counted_or_have_roles(text: str, workers: FirstWorkers) -> None:
    assert workers_option(text) == workers


@pytest.mark.parametrize("text", ["", "a", "prefill", "prefill:0", "cook:1", "prefill:1,", "1:1"])
def test_other_workers_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="both, prefill, decode, such as"):
        workers_option(text)


@pytest.mark.parametrize(("text", "bounds"), [("0:1", (0, 1)), ("1:4", (1, 4)), ("8:8", (8, 8))])
def test_bounds_are_read(text: str, bounds: tuple[int, int]) -> None:
    assert parse_bounds(text, 8) == bounds


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *(
            (text, "is not MIN:MAX")
            for text in ("", "3", "1:", ":3", "-1:3", "1:2:3", "a:b", "1.5:2")
        ),
        ("0:0", "MAX must be between 1 and 8, got 0"),
        ("1:9", "MAX must be between 1 and 8, got 9"),
        ("4:2", "MIN is 4, which is more than MAX, 2"),
    ],
)
def test_other_bounds_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_bounds(text, 8)

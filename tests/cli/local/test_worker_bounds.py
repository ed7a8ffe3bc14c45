"""``--autoscale MIN:MAX`` as it is written, and what is refused."""

from __future__ import annotations

import pytest

from millrace.cli.local.worker_bounds import parse_bounds
from millrace.schemas.errors import ConfigError


@pytest.mark.parametrize(("text", "bounds"), [("0:1", (0, 1)), ("1:4", (1, 4)), ("8:8", (8, 8))])
def test_bounds_are_read(text: str, bounds: tuple[int, int]) -> None:
    assert parse_bounds(text, 8) == bounds


@pytest.mark.parametrize(
    ("text", "says"),
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
def test_other_bounds_are_refused(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_bounds(text, 8)

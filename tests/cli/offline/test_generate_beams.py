"""Beam searches in the lines of ``millrace generate``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.cli.offline.generating import generate

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_line_asks_for_a_beam_search(tmp_path: Path, checkpoint: Path) -> None:
    asked: dict[str, Any] = {"prompt": "mill wheel", "max_tokens": 8, "ignore_eos": True}
    beams = asked | {"use_beam_search": True, "n": 3}
    lines = [beams, asked | {"temperature": 0}, beams | {"n": 1}, beams | {"length_penalty": 2}]
    code, answers = generate(tmp_path, checkpoint, lines)
    assert code == 0
    found, greedy, narrow, rewarded = answers
    assert [choice["index"] for choice in found["choices"]] == [0, 1, 2]
    assert [choice["finish_reason"] for choice in found["choices"]] == ["length"] * 3
    assert found["completion_tokens"] == 24
    logprobs = [choice["cumulative_logprob"] for choice in found["choices"]]
    assert logprobs == sorted(logprobs, reverse=True)
    assert len({choice["text"] for choice in found["choices"]}) == 3
    # One beam takes the likeliest token, always.
    assert narrow["token_ids"] == greedy["token_ids"]
    assert logprobs[0] >= narrow["cumulative_logprob"]
    assert "cumulative_logprob" not in greedy
    # All have the same length here.
    assert rewarded["choices"] == found["choices"]


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"stop": "x"}, "stop"),
        ({"grammar": {"kind": "json_object"}}, "grammar"),
        ({"top_p": 0.9}, "top_p"),
        ({"n": 17}, "n must be"),
        ({"cancel_after_tokens": 3}, "cancel_after_tokens"),
    ],
)
def test_what_does_not_go_with_it_is_refused_by_name(
    tmp_path: Path,
    checkpoint: Path,
    capsys: pytest.CaptureFixture[str],
    given: dict[str, Any],
    field: str,
) -> None:
    code, answers = generate(
        tmp_path, checkpoint, [{"prompt": "x", "use_beam_search": True} | given]
    )
    assert code != 0
    assert answers == []
    assert field in capsys.readouterr().err


def test_a_search_is_cancelled_before_it_begins(tmp_path: Path, checkpoint: Path) -> None:
    line = {"prompt": "x", "use_beam_search": True, "n": 2, "cancel_after_tokens": 0}
    _, [answer] = generate(tmp_path, checkpoint, [line])
    assert [choice["cancelled"] for choice in answer["choices"]] == [True, True]

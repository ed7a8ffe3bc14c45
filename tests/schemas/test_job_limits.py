"""Bounds of a job's fields: a value out of bounds is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from millrace.bus import codec
from millrace.bus.jobs.decoding import read_job
from millrace.schemas.errors import MalformedMessageError
from millrace.schemas.jobs import (
    MAX_LABEL_CHARACTERS,
    MAX_NAME_CHARACTERS,
    MAX_TIME_NS,
    ChatMessage,
    Job,
)

_NAMES = ("request_id", "reply", "tenant")
_LABELS = ("model", "model_requested", "route_reason", "user", "session_id", "traceparent")
_BOUNDS = {
    **dict.fromkeys(_NAMES, MAX_NAME_CHARACTERS),
    **dict.fromkeys(_LABELS, MAX_LABEL_CHARACTERS),
}


def _job(**fields: Any) -> Job:
    return Job(**{"request_id": "a", "model": "demo", "prompt": "b", **fields})


@pytest.mark.parametrize(("name", "bound"), _BOUNDS.items())
def test_a_text_that_is_too_long_is_refused_by_name(name: str, bound: int) -> None:
    assert getattr(_job(**{name: "x" * bound}), name) == "x" * bound
    with pytest.raises(ValueError, match=rf"\b{name}\b"):
        _job(**{name: "x" * (bound + 1)})


@pytest.mark.parametrize("name", ["received_ns", "deadline_ns"])
@pytest.mark.parametrize("time_ns", [-1, MAX_TIME_NS + 1])
def test_a_time_out_of_range_is_refused_by_name(name: str, time_ns: int) -> None:
    assert getattr(_job(**{name: MAX_TIME_NS}), name) == MAX_TIME_NS
    with pytest.raises(ValueError, match=name):
        _job(**{name: time_ns})


@pytest.mark.parametrize("fields", [{"prompt": None}, {"prompt_token_ids": (1,)}])
def test_a_job_has_one_prompt(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="exactly one"):
        _job(**fields)


def test_a_job_has_an_id() -> None:
    with pytest.raises(ValueError, match="request_id"):
        _job(request_id="")


def test_turns_without_text() -> None:
    def messages(role: str) -> tuple[ChatMessage, ...] | None:
        turn = f'{{"role":"{role}","content":null,"tool_calls":[]}}'
        payload = (
            f'{{"request_id":"a","model":"demo","messages":[{turn}],"sampling":{{}}}}'.encode()
        )
        return read_job("jobs.demo.free", payload, codec.JSON, 1).messages

    assert messages("assistant") == (ChatMessage("assistant", ""),)
    assert messages("tool") == (ChatMessage("tool", ""),)
    with pytest.raises(MalformedMessageError, match=r"'user' must be text - at .*messages\[0\]"):
        messages("user")

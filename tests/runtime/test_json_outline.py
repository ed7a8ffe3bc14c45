"""Outline of JSON bodies: the numbers of their parts are limited."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from millrace.runtime.json.faults import MAX_MESSAGES, MAX_TOKEN_IDS, check_outline
from millrace.schemas.errors import ParameterError
from millrace.schemas.jobs import ChatMessage, Job

MESSAGE = {"role": "user", "content": "a, b, [c], {d}"}
TOO_MANY: list[tuple[str, Any]] = [
    ("prompt", [7] * (MAX_TOKEN_IDS + 1)),
    ("prompt", [[7] * MAX_TOKEN_IDS, [7]]),
    ("input", [7] * (MAX_TOKEN_IDS + 1)),
    ("messages", [MESSAGE] * (MAX_MESSAGES + 1)),
    ("input", [MESSAGE] * (MAX_MESSAGES + 1)),
]


@pytest.mark.parametrize(("name", "value"), TOO_MANY)
def test_too_much_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ParameterError, match="at most") as refused:
        check_outline(json.dumps({"model": "m", name: value}).encode())
    assert refused.value.param == name


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt_token_ids": (7,) * (MAX_TOKEN_IDS + 1)},
        {"messages": (ChatMessage("user", "a"),) * (MAX_MESSAGES + 1)},
    ],
)
@pytest.mark.parametrize("encode", [msgspec.json.encode, msgspec.msgpack.encode])
def test_job_with_too_much_is_refused(fields: dict[str, Any], encode: Any) -> None:
    payload = encode(Job(request_id="r", model="m", **fields))
    with pytest.raises(ParameterError, match="at most"):
        check_outline(payload, is_json=encode is msgspec.json.encode)


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": ", " * 2_000_000},
        {"prompt": [7] * MAX_TOKEN_IDS},
        {"input": [", " * 1_000_000, "[1,2"]},
        {"messages": [MESSAGE] * MAX_MESSAGES},
        {"messages": [{"role": "user", "content": ", " * 2_000_000}]},
        [1] * 200_000,
    ],
)
def test_bodies_within_the_limits_are_left_alone(body: Any) -> None:
    check_outline(json.dumps(body).encode())
    check_outline(json.dumps(body).encode()[:-1])
    check_outline(msgspec.msgpack.encode(body), is_json=False)


def test_bytes_that_are_no_body_are_left_to_their_decoder() -> None:
    for junk in (b"{" * 300_000, b"\xff" * 300_000, b"\xdd" * 300_000):
        check_outline(junk)
        check_outline(junk, is_json=False)

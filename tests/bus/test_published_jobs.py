"""Jobs of services, as the serializers of their languages write them."""

from __future__ import annotations

import random
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.bus import codec
from millrace.bus.jobs import decoding
from millrace.bus.jobs.published import encode_job
from millrace.registry.requests.job_bodies import read_body
from millrace.schemas.errors import MalformedMessageError, MillraceError, ParameterError
from millrace.schemas.jobs import Job, Tier
from millrace.schemas.pooling import Pooling

SUBJECT = "jobs.demo.pro.acme"
MESSAGES: Any = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "hi"}], "name": "u"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "x"},
]
SCHEMA = {"type": "object", "properties": {"a": {"enum": [None, 1.0, "x"]}}, "default": None}
CHAT: dict[str, Any] = {
    "request_id": "r1",
    "model": "demo",
    "reply": "acme/svc",
    "store_result": True,
    "deadline_ns": 1_795_824_541_507_435_520,
    "tier": "pro",
    "tenant": "acme",
    "messages": MESSAGES,
    "tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}],
    "tool_choice": {"type": "function", "function": {"name": "f"}},
    "max_completion_tokens": 64,
    "seed": 2**53 + 2,
    "priority": -3,
    "stop": ["x"],
    "stop_token_ids": [3, 4],
    "logit_bias": {"5": 1.5},
    "temperature": 1.0,
    "metadata": {"k": "v"},
    "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}},
    "chat_template_kwargs": {"x": None, "y": 2.0},
    "prediction": {"type": "content", "content": "yes"},
    "stream_options": {"include_usage": True},
    "stream": True,
}
NESTED: dict[str, Any] = {
    "request_id": "r1",
    "model": "demo",
    "prompt_token_ids": [1, 2, 3],
    "deadline_ns": 1_795_824_541_507_435_520,
    "sampling": {"max_tokens": 4, "stop": ["x"], "logit_bias": {"5": 1.5}, "top_p": 1.0},
    "priority": 5,
    "metadata": {"k": "v"},
}
# Fields that may be left out, by where they may stand; each is written as null.
UNSET = {
    "": ("adapter", "user", "n", "guided_json", "functions", "logprobs", "traceparent", "source"),
    "messages": ("name", "refusal", "audio"),
    "tools": ("custom", "format"),
    "function": ("strict", "description"),
    "json_schema": ("strict", "description"),
    "stream_options": ("continuous_usage_stats",),
    "metadata": ("other",),
    "logit_bias": ("6",),
    "tool_choice": ("custom", "mode"),
    "sampling": ("grammar", "min_tokens", "bad_words", "temperature"),
}
_CLOSED = ("parameters", "schema", "chat_template_kwargs")


def read(body: dict[str, Any], *, packed: bool = False, subject: str = SUBJECT) -> Job:
    payload = msgspec.msgpack.encode(body) if packed else msgspec.json.encode(body)
    return decoding.read_job(subject, payload, None, 7)


class Foreign:
    """Writes a job as another language does: nulls, floats and fields in any order."""

    def __init__(self, draw: random.Random, *, in_nested_form: bool) -> None:
        self._draw = draw
        self._in_nested_form = in_nested_form

    def written(self, value: Any, name: str = "") -> Any:
        draw = self._draw
        if isinstance(value, dict):
            pairs = [
                (key, value if key in _CLOSED else self.written(value, key))
                for key, value in value.items()
            ]
            unset = UNSET.get(name, ())
            if self._in_nested_form and name == "":
                unset = ("adapter", "user", "session_id", "messages", "pooling", "tools")
            pairs += [(key, None) for key in unset if draw.random() < 0.5 and key not in value]
            draw.shuffle(pairs)
            return dict(pairs)
        if isinstance(value, list):
            return [self.written(item, name) for item in value]
        if type(value) is int and value == float(value) and draw.random() < 0.7:
            return float(value)
        return value


@given(seed=st.integers(0, 2**32), packed=st.booleans())
def test_foreign_serializers_say_the_same(seed: int, packed: bool) -> None:
    plain = read(CHAT)
    foreign = Foreign(random.Random(seed), in_nested_form=False).written(CHAT)
    job = read(foreign, packed=packed)
    assert read_body(job) == read_body(plain)
    assert msgspec.structs.replace(job, body=b"x", frames_as_json=True) == msgspec.structs.replace(
        plain, body=b"x"
    )


@given(seed=st.integers(0, 2**32), packed=st.booleans())
def test_foreign_serializers_agree_in_the_nested_form(seed: int, packed: bool) -> None:
    foreign = Foreign(random.Random(seed), in_nested_form=True).written(NESTED)
    job = read(foreign, packed=packed, subject="jobs.demo.free")
    assert msgspec.structs.replace(job, frames_as_json=True) == read(
        NESTED, subject="jobs.demo.free"
    )


def test_the_order_of_fields_makes_no_other_job() -> None:
    """A job that is published again may be written in another order."""
    other = dict(reversed(CHAT.items()))
    assert read(other) == read(CHAT)


def test_the_fields_of_a_job_are_read_at_once_and_its_body_later() -> None:
    job = read(CHAT)
    assert (job.request_id, job.model, job.tier, job.tenant) == ("r1", "demo", Tier.PRO, "acme")
    assert (job.reply, job.store_result) == ("acme/svc", True)
    assert job.deadline_ns == CHAT["deadline_ns"]
    assert set(msgspec.json.decode(job.body)) == CHAT.keys() - {
        *("request_id", "reply", "store_result", "deadline_ns", "tier", "tenant")
    }


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"deadline_ns": 4.5}, "deadline_ns"),
        ({"received_ns": 0.1}, "received_ns"),
        ({"reply": 3}, "reply"),
        ({"tier": "gold"}, "tier"),
        ({"request_id": None}, "request_id"),
        ({"colour": 1}, "colour"),
        ({"body": "x"}, "body"),
        ({"answer": {}}, "answer"),
        ({"request_id": 7}, "request_id"),
        ({"request_id": 7.0}, "request_id"),
        ({"request_id": True}, "request_id"),
        ({"request_id": ["r"]}, "request_id"),
        ({"model": "other"}, "model"),
        ({"deadline": "tomorrow"}, "deadline"),
        ({"deadline": "2026-11-28T12:00:00"}, "deadline"),
        ({"deadline": 5}, "deadline"),
        ({"deadline": "2026-11-28T12:00:00Z", "deadline_ns": 5}, "deadline"),
        ({"deadline_ns": "5"}, "deadline_ns"),
        ({"sampling": {"max_tokens": 4.5}}, "sampling.max_tokens"),
        ({"sampling": {}, "stream": True}, "stream"),
        ({"tools": [{"name": "f"}], "tool_choice": "auto"}, "tool_choice"),
        ({"messages": None, "prompt": 7}, "prompt"),
        ({"messages": None}, "messages"),
        ({"model": 3}, "model"),
        ({"request_id": "r" * 129}, "request_id"),
        ({"deadline_ns": -5}, "deadline_ns"),
        ({"deadline_ns": 1e300}, "deadline_ns"),
        ({"deadline": "0001-01-01T00:00:00Z"}, "deadline"),  # .NET's default
        ({"deadline": "9999-12-31T23:59:59Z"}, "deadline"),
        ({"sampling": {"max_tokens": 1e300}}, "sampling.max_tokens"),
        (
            {"sampling": {"max_tokens": 4.0, "logit_bias": {"1" * 5_000: 1.0}}},
            "sampling.logit_bias",
        ),
        (
            {"sampling": {"max_tokens": 4.0, "logit_bias": {"9" * 20: 1}}},
            f"sampling.logit_bias.{'9' * 20}",
        ),
    ],
)
def test_what_is_wrong_is_named(body: dict[str, Any], param: str, *, packed: bool) -> None:
    given = {"request_id": "r1", "model": "demo", "messages": MESSAGES[:1]} | body
    with pytest.raises(MalformedMessageError) as refused:
        read(given, packed=packed, subject="jobs.demo.free")
    assert refused.value.param == param
    assert param.rpartition(".")[2] in refused.value.message


@pytest.mark.parametrize(
    ("value", "param"),
    [
        ({"max_tokens": 4.5}, "max_tokens"),
        ({"user": b"u"}, "user"),
        ({"temperature": float("inf")}, "temperature"),
        ({"chat_template_kwargs": {"a": [b"x"]}}, "chat_template_kwargs.a[0]"),
        ({"metadata": {"at": datetime(2026, 1, 1, tzinfo=UTC)}}, "metadata.at"),
        ({"tools": [{"function": {"name": b"f"}}]}, "tools[0].function.name"),
        ({"stop_token_ids": [1, 2.5]}, "stop_token_ids[1]"),
        ({"messages": [{"role": "user", "content": 4}]}, "messages[0].content"),
        ({"max_tokens": 2.0**64}, "max_tokens"),
        ({"logit_bias": {2.5: 1}}, "logit_bias.2.5"),
        ({"chat_template_kwargs": {"a": {True: 1}}}, "chat_template_kwargs.a"),
        ({"tools": [{"function": {True: "f"}}]}, "tools[0].function"),
    ],
)
def test_what_messagepack_has_and_json_has_not_is_named(value: dict[str, Any], param: str) -> None:
    body = {"request_id": "r1", "model": "demo", "messages": MESSAGES[:2]} | value
    with pytest.raises(ParameterError) as refused:
        read_body(read(body, packed=True, subject="jobs.demo.free"))
    assert refused.value.param == param


def test_a_bug_in_the_reader_refuses_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    def read_published(_payload: bytes, _content_type: str | None) -> Job:
        raise OverflowError

    monkeypatch.setattr(decoding, "read_published", read_published)
    with pytest.raises(MalformedMessageError, match="OverflowError"):
        read({"request_id": "r1", "model": "demo", "prompt": "x"}, subject="jobs.demo.free")


def test_schemas_count_in_integers() -> None:
    """Gson writes the integers of a schema as floats when it reads the schema without a type."""
    schema = {
        "type": "object",
        "properties": {"a": {"maxLength": 3.0, "enum": [1.0]}, "maxLength": {"minItems": 2.0}},
        "default": {"maxItems": 1.0},
    }
    whole: dict[str, Any] = {
        "type": "object",
        "properties": {"a": {"maxLength": 3, "enum": [1.0]}, "maxLength": {"minItems": 2}},
        "default": {"maxItems": 1.0},
    }
    body = {"request_id": "r1", "model": "demo", "messages": MESSAGES[:1]}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    job = read(body | {"tools": tools, "guided_json": schema}, subject="jobs.demo.free")
    request = read_body(job)
    assert repr(request.tools[0].parameters) == repr(whole)
    assert request.sampling.grammar is not None
    assert request.sampling.grammar.text == msgspec.json.encode(whole).decode()


@pytest.mark.parametrize(
    ("deadline", "ns"),
    [
        ("2026-11-28T12:00:00Z", 1_795_867_200_000_000_000),
        ("2026-11-28T13:00:00+01:00", 1_795_867_200_000_000_000),
        ("2026-11-28T12:00Z", 1_795_867_200_000_000_000),  # Java's OffsetDateTime
        ("2026-11-28T12:00:00.123456789Z", 1_795_867_200_123_456_000),  # Go's time.Time
        ("2026-11-28T12:00:00.1234567+00:00", 1_795_867_200_123_456_000),  # .NET's DateTimeOffset
    ],
)
@pytest.mark.parametrize("field", ["deadline", "deadline_ns"])
def test_a_deadline_may_be_a_text(deadline: str, ns: int, field: str) -> None:
    for body in ({"messages": MESSAGES[:1]}, {"prompt": "x"}, {"prompt": "x", "sampling": {}}):
        given = {"request_id": "r1", "model": "demo", field: deadline} | body
        assert read(given, subject="jobs.demo.free").deadline_ns == ns


def test_a_deadline_may_be_a_timestamp_of_messagepack() -> None:
    """JavaScript's @msgpack/msgpack encodes a Date as a timestamp extension."""
    at = datetime(2026, 11, 28, 12, tzinfo=UTC)
    body = {"request_id": "r1", "model": "demo", "messages": MESSAGES[:1], "deadline": at}
    job = read(body, packed=True, subject="jobs.demo.free")
    assert job.deadline_ns == 1_795_867_200_000_000_000


@pytest.mark.parametrize("content_type", [None, codec.JSON])
def test_a_byte_order_mark_is_no_part_of_a_job(content_type: str | None) -> None:
    payload = b"\xef\xbb\xbf" + msgspec.json.encode(CHAT)
    assert decoding.read_job(SUBJECT, payload, content_type, 7) == read(CHAT)


@pytest.mark.parametrize(
    ("body", "is_nested"),
    [
        ({"messages": MESSAGES[:1]}, False),
        ({"messages": MESSAGES}, False),
        ({"messages": MESSAGES[:1], "tools": CHAT["tools"]}, False),
        ({"messages": MESSAGES[:1], "tools": [{"name": "f"}]}, True),
        ({"messages": MESSAGES[:1], "tools": [{"name": "f", "type": "web_search"}]}, False),
        ({"messages": MESSAGES[:1], "sampling": {}}, True),
        ({"messages": MESSAGES[:1], "sampling": None}, False),
        ({"messages": MESSAGES[:1], "prediction": "yes"}, True),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "content": None,
                        "tool_calls": [{"id": "c", "name": "f", "arguments": "{}"}],
                    }
                ]
            },
            True,
        ),
        ({"prompt": "x"}, True),
        ({"prompt": "x", "user": "u"}, True),
        ({"prompt": "x", "max_tokens": 3}, False),
        ({"prompt": [1, 2]}, False),
        ({"prompt": "x", "store_result": True, "adapter": "a"}, True),
        ({"prompt": "x", "pooling": "mean"}, True),
        ({"prompt_token_ids": [1]}, True),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_the_two_forms_are_told_apart(
    body: dict[str, Any], *, is_nested: bool, packed: bool
) -> None:
    job = read(
        {"request_id": "r1", "model": "demo"} | body, packed=packed, subject="jobs.demo.free"
    )
    assert bool(job.body) is not is_nested
    assert job.pooling is (Pooling.MEAN if "pooling" in body else None)


def test_our_own_parts_publish_bodies_too() -> None:
    body = msgspec.msgpack.encode({"messages": MESSAGES, "max_tokens": 3})
    job = Job(request_id="r1", model="demo", body=body, tenant="acme", tier=Tier.PRO, reply="acme")
    read_again = decoding.read_job(SUBJECT, encode_job(job), None, 7)
    assert (read_again.reply, read_again.tenant) == ("acme", "acme")
    assert read_body(read_again).sampling.max_tokens == 3


def test_a_gateway_s_job_is_what_it_says() -> None:
    """Nulls and floats are refused in a gateway's job, which is read without leniency."""
    body = {"request_id": "r1", "model": "demo", "prompt_token_ids": [1], "reply": None}
    with pytest.raises(MillraceError):
        read(body, packed=True, subject="jobs.demo.free.acme.reserved")

"""Checked-in AsyncAPI contract, against the contract generated from the schemas."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError

from millrace.bus import asyncapi, codec, subjects
from millrace.bus.job_queue import TenantQueue
from millrace.bus.jobs.published import read_published
from millrace.bus.subjects import token, untoken
from millrace.schemas.frames import Delta, Done, FinishReason
from millrace.schemas.jobs import Job, Tier
from tests.support.repository import ROOT

CHECKED_IN = ROOT / "docs" / "asyncapi.json"


def read() -> dict[str, Any]:
    document: dict[str, Any] = json.loads(CHECKED_IN.read_text(encoding="utf-8"))
    return document


def references(node: object) -> set[str]:
    if isinstance(node, dict):
        found = {node["$ref"]} if isinstance(node.get("$ref"), str) else set()
        return found.union(*map(references, node.values()))
    if isinstance(node, list):
        return set().union(*map(references, node))
    return set()


def validator(message: str) -> Draft202012Validator:
    document = read()
    payload = document["components"]["messages"][message]["payload"]
    return Draft202012Validator({**payload, "components": document["components"]})


def test_the_asyncapi_document_is_not_stale() -> None:
    stale = "run: python -m millrace.bus.asyncapi > docs/asyncapi.json"
    assert CHECKED_IN.read_text(encoding="utf-8") == asyncapi.text(), stale


def test_every_reference_leads_somewhere() -> None:
    document = read()
    for reference in references(document):
        node: Any = document
        for key in reference.removeprefix("#/").split("/"):
            node = node[key]


def schemas_in(schema: dict[str, Any], place: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """A schema and all that are in it, with their places."""
    yield place, schema
    for keyword in ("items", "additionalProperties"):
        if isinstance(schema.get(keyword), dict):
            yield from schemas_in(schema[keyword], f"{place}/{keyword}")
    for keyword in ("prefixItems", "anyOf", "oneOf", "allOf"):
        for number, one in enumerate(schema.get(keyword, ())):
            yield from schemas_in(one, f"{place}/{keyword}/{number}")
    for name, one in schema.get("properties", {}).items():
        yield from schemas_in(one, f"{place}/properties/{name}")


def test_a_generator_finds_a_name_and_a_type_for_every_schema() -> None:
    """A generator calls the class of a schema without a name AnonymousSchema_275."""
    places: dict[str, str] = {}
    for name, component in read()["components"]["schemas"].items():
        assert component["title"] == name
        for place, schema in schemas_in(component, name):
            if "$ref" in schema:
                continue
            is_plain = schema.get("type") in ("string", "integer", "number", "boolean", "null")
            if not is_plain or "enum" in schema:
                title = schema["title"]
                assert re.fullmatch("[A-Z][A-Za-z0-9]*", title), place
                assert places.setdefault(title, place) == place, f"{title} has two schemas"
            is_anything = schema.keys() <= {"title", "description", "default"}
            assert is_anything or {"type", "anyOf", "oneOf"} & schema.keys(), place
            assert {"type": "null"} not in schema.get("anyOf", ()) or "items" in place, place
            assert schema.get("format") == "int64" or schema.get("type") != "integer", place
            # Java and C# take neither an empty list nor 1 as the default of what they make of it.
            assert schema.get("default", 0) in (0, False, True) or isinstance(
                schema["default"], str
            ), place


def test_messages_have_names_and_both_encodings_where_both_are_read() -> None:
    document = read()
    messages = document["components"]["messages"]
    for key, message in messages.items():
        assert message["name"] == key
        assert message["title"]
        if key == "Empty":
            continue
        is_json = key.endswith("Json")
        assert message["contentType"] == f"application/{'json' if is_json else 'msgpack'}"
        assert references(message["payload"])

    def carried(channel: str) -> set[str]:
        return set(document["channels"][channel]["messages"])

    for channel in ("jobs", "jobsWithoutTenant"):
        in_msgpack = {name for name in carried(channel) if not name.endswith("Json")}
        assert "Job" in in_msgpack
        assert carried(channel) == in_msgpack | {f"{name}Json" for name in in_msgpack}
    assert carried("frames") == {"Frame", "FrameJson"}
    assert carried("results") == {"JobResultJson"}
    answers = {"JobResult", "JobResultJson", "ResultError", "ResultErrorJson"}
    assert carried("resultRequestsAnswers") == answers
    assert carried("cancels") == {"Empty"}


def test_names_of_subjects_and_numbers_are_explained_where_they_are_used() -> None:
    document = read()
    notes = document["info"]["description"]
    for text in ("report.7", "a/b c", "_", ""):
        encoded = re.findall(r"%[0-9A-F]{2}|%$", token(text))
        assert all(one in notes for one in encoded), text
    for channel in document["channels"].values():
        for name, parameter in channel.get("parameters", {}).items():
            assert "enum" in parameter or name == "reason" or "one subject token" in str(parameter)
            for example in parameter.get("examples", ()):
                assert token(untoken(example)) == example
    job = document["components"]["schemas"]["Job"]["properties"]
    assert "Nanoseconds since 1970" in job["deadline_ns"]["description"]
    assert "2^53" in notes


@pytest.mark.parametrize("field", ["request_id", "reply", "tenant"])
def test_the_length_of_a_name_is_the_one_that_a_job_checks(field: str) -> None:
    bounds = read()["components"]["schemas"]["Job"]["properties"][field]
    names = {"request_id": "r", field: "x" * bounds["maxLength"]}
    Job(model="m", prompt="", **names)
    with pytest.raises(ValueError, match=field):
        Job(model="m", prompt="", **(names | {field: f"{names[field]}x"}))
    if bounds.get("minLength"):
        with pytest.raises(ValueError, match=field):
            Job(model="m", prompt="", **(names | {field: ""}))


def test_its_addresses_are_the_ones_on_the_wire() -> None:
    channels = read()["channels"].values()
    patterns = [
        re.compile(re.sub(r"\\\{\w+\\\}", "[A-Za-z0-9_%-]+", re.escape(channel["address"])))
        for channel in channels
        if channel["address"] is not None
    ]
    used = [
        subjects.job(TenantQueue("m/1", Tier.PRO, None)),
        subjects.job(TenantQueue("m/1", Tier.PRO, "t 1")),
        subjects.job(TenantQueue("m/1", Tier.PRO, "t 1", reserved=True)),
        subjects.frames("g 1", "r.1"),
        subjects.envelope("g 1"),
        subjects.cancel("r.1"),
        subjects.owner_cancel("t 1", "r.1"),
        subjects.result_request("t 1", "r.1"),
        subjects.result("t", "r.1"),
        subjects.dead_job("bad luck"),
        subjects.resume("g", "r"),
        subjects.handover("g 1", "r"),
        subjects.worker_commands("w.1"),
        subjects.ended("w.1"),
        subjects.queue_status("m/1"),
        subjects.heartbeat("w.1"),
        subjects.prefix_report("w.1"),
        subjects.TELEMETRY,
        *subjects.RECORD_TOPICS,
    ]
    for name in used:
        assert any(pattern.fullmatch(name) for pattern in patterns), name


def test_what_we_send_is_what_it_describes() -> None:
    job = Job(request_id="r1", model="demo", prompt="hi", tier=Tier.PRO)
    validator("Job").validate(json.loads(msgspec.json.encode(job)))
    for frame in (
        Delta(index=0, token_ids=(1, 2), text="ab", text_ends=(1, 2)),
        Done(finish_reason=FinishReason.STOP, num_tokens=2),
    ):
        validator("Frame").validate(json.loads(msgspec.json.encode(frame)))


def test_a_chat_job_is_a_chat_body_with_the_fields_of_a_job() -> None:
    job = {
        "request_id": "r1",
        "model": "demo",
        "reply": "acme",
        "deadline": "2026-11-28T12:00:00Z",
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "tool_choice": "required",
    }
    validator("ChatJob").validate(job)
    wrongs: list[dict[str, Any]] = [{"sampling": {}}, {"messages": "hi"}, {"request_id": 7}]
    for wrong in wrongs:
        with pytest.raises(ValidationError):
            validator("ChatJob").validate(job | wrong)
    validator("CompletionJob").validate({"request_id": "r1", "model": "m", "prompt": [1], "n": 1})


def test_the_page_of_jobs_shows_what_the_bus_carries() -> None:
    text = (ROOT / "docs" / "jobs.md").read_text(encoding="utf-8")
    job, delta = re.findall(r"```json\n(.*?)```", text, re.DOTALL)
    validator("ChatJob").validate(json.loads(job))
    validator("Frame").validate(json.loads(delta))
    assert codec.FRAME.decode(delta.encode(), codec.JSON)
    assert read_published(job.encode(), codec.JSON).body


def test_it_refuses_what_the_bus_refuses() -> None:
    for body in ({"model": "demo", "prompt": "x"}, {"request_id": "r", "model": "m", "colour": 1}):
        with pytest.raises(ValidationError):
            validator("Job").validate(body)

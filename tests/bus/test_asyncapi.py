"""The checked-in contract is the one that the schemas make."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec
import pytest
from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError

from millrace.bus import asyncapi, codec, subjects
from millrace.bus.job_queue import TenantQueue
from millrace.bus.jobs.published import read_published
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


def test_it_is_not_stale() -> None:
    stale = "run: python -m millrace.bus.asyncapi > docs/asyncapi.json"
    assert CHECKED_IN.read_text(encoding="utf-8") == asyncapi.text(), stale


def test_every_reference_leads_somewhere() -> None:
    document = read()
    for reference in references(document):
        node: Any = document
        for key in reference.removeprefix("#/").split("/"):
            node = node[key]


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

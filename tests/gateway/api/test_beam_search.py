"""Beam search over HTTP: one job, all of its answers, and by name what does not go with it."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import openai
import pytest

from millrace.schemas.frames import Beam, Failed, Frame, Started
from tests.gateway.resuming.clients import opened, send, until
from tests.support.running_gateway import MODEL, RunningGateway
from tests.support.waiting import eventually

_BEAMS = {"use_beam_search": True, "length_penalty": 0.5}
_CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "one. two"}]}
_TOOL: Any = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
_PATHS = [("chat/completions", _CHAT), ("completions", {"model": MODEL, "prompt": "one. two"})]


async def test_all_answers_of_one_job_are_the_choices(
    front: RunningGateway, client: openai.AsyncOpenAI
) -> None:
    answer = await client.chat.completions.create(**_CHAT, n=3, extra_body=_BEAMS)
    assert [choice.message.content for choice in answer.choices] == [
        "one. two",
        "one. two!",
        "one. two!!",
    ]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert {choice.finish_reason for choice in answer.choices} == {"stop"}
    assert [choice.model_extra for choice in answer.choices] == [
        {"stop_reason": None},
        {"stop_reason": 1},
        {"stop_reason": 2},
    ]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (8, 8 + 9 + 10)
    [job] = front.worker.jobs
    asked = job.sampling
    assert (asked.use_beam_search, asked.n, asked.length_penalty) == (True, 3, 0.5)


async def test_each_prompt_of_a_completion_is_searched(
    front: RunningGateway, client: openai.AsyncOpenAI
) -> None:
    answer = await client.completions.create(
        model=MODEL,
        prompt=["ab", "cde"],
        n=2,
        echo=True,
        max_tokens=3,
        extra_body=_BEAMS | {"return_token_ids": True},
    )
    assert [choice.text for choice in answer.choices] == ["abab", "abab!", "cdecde", "cdecde"]
    assert [choice.finish_reason for choice in answer.choices] == ["stop"] * 3 + ["length"]
    extras = [choice.model_extra or {} for choice in answer.choices]
    assert [one["token_ids"] for one in extras] == [
        *([0, 1], [100, 101, 102]),
        *([0, 1, 2], [100, 101, 102]),
    ]
    assert [bytes(one["prompt_token_ids"]) for one in extras] == [b"ab", b"ab", b"cde", b"cde"]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 2 + 3 + 3 + 3)
    assert len(front.worker.jobs) == 2


async def test_thoughts_and_calls_are_told_from_the_text_of_each_answer(
    front: RunningGateway, client: openai.AsyncOpenAI
) -> None:
    call = 'so: <tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
    front.worker.script = lambda _: call
    answer = await client.chat.completions.create(**_CHAT, n=2, tools=[_TOOL], extra_body=_BEAMS)
    for choice in answer.choices:
        assert choice.message.tool_calls is not None
        [made] = choice.message.tool_calls
        assert made.type == "function"
        assert made.function.name == "look"
        assert choice.finish_reason == "tool_calls"


@pytest.mark.parametrize(("path", "body"), _PATHS)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("stream", True), ("stop", ["x"]), ("top_p", 0.9), ("top_k", 5), ("min_p", 0.1)),
        *(("typical_p", 0.5), ("repetition_penalty", 1.1), ("presence_penalty", 0.5)),
        *(("frequency_penalty", 0.5), ("logit_bias", {"5": 1}), ("bad_words", ["x"])),
        *(("allowed_token_ids", [5]), ("prompt_logprobs", 1), ("length_penalty", 10.5)),
        *(("response_format", {"type": "json_object"}), ("guided_json", {"type": "object"})),
        *(("guided_regex", "a+"), ("guided_choice", ["a"]), ("n", 17), ("n", 0)),
        ("structured_outputs.json", {"type": "object"}),
    ],
)
async def test_what_does_not_go_with_beams_is_refused_by_name(
    front: RunningGateway,
    http: httpx.AsyncClient,
    path: str,
    body: dict[str, Any],
    field: str,
    value: Any,
) -> None:
    name, _, part = field.partition(".")
    given = {name: {part: value} if part else value}
    refused = await http.post(f"/v1/{path}", json=body | _BEAMS | given)
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["param"] == field
    assert name in error["message"]
    assert not front.worker.jobs


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("logprobs", {"logprobs": True, "top_logprobs": 2}),
        ("thinking_token_budget", {"thinking_token_budget": 5}),
        ("tool_choice", {"tools": [_TOOL], "tool_choice": "required"}),
        ("parallel_tool_calls", {"tools": [_TOOL], "parallel_tool_calls": False}),
        (
            "tools",
            {"tools": [{**_TOOL, "function": {**_TOOL["function"], "strict": True}}]},
        ),
        ("server_tools", {"server_tools": ["clock"]}),
    ],
)
async def test_what_chats_have_beside_that_is_refused_too(
    front: RunningGateway, http: httpx.AsyncClient, field: str, given: dict[str, Any]
) -> None:
    refused = await http.post("/v1/chat/completions", json=_CHAT | _BEAMS | given)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)
    assert not front.worker.jobs


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("completions", {"model": MODEL, "prompt": "x", "logprobs": 1}),
        ("responses", {"model": MODEL, "input": "x"}),
        ("messages", {"model": MODEL, "max_tokens": 5, "messages": _CHAT["messages"]}),
    ],
)
async def test_other_ways_to_ask_refuse_beams_by_name(
    front: RunningGateway, http: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> None:
    refused = await http.post(f"/v1/{path}", json=body | {"use_beam_search": True})
    field = "logprobs" if path == "completions" else "use_beam_search"
    assert refused.status_code == 400
    assert field in refused.json()["error"]["message"]
    assert not front.worker.jobs


async def test_a_socket_refuses_beams_by_name(front: RunningGateway) -> None:
    async with opened(front) as socket:
        await send(socket, "generate", id="a", **_CHAT, use_beam_search=True)
        [*_, refused] = await until(socket, "error")
    assert refused["param"] == "use_beam_search"
    assert not front.worker.jobs


async def test_length_penalty_alone_is_refused(http: httpx.AsyncClient) -> None:
    for path, body in _PATHS:
        refused = await http.post(f"/v1/{path}", json=body | {"length_penalty": 2.0})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "length_penalty")


async def test_beams_of_an_attempt_that_died_are_forgotten(
    front: RunningGateway, client: openai.AsyncOpenAI
) -> None:
    """Another attempt starts anew, so nothing of an older epoch may be part of the answer."""
    worker = front.worker
    worker.gate.clear()
    asked = asyncio.create_task(client.chat.completions.create(**_CHAT, n=2, extra_body=_BEAMS))
    await eventually(lambda: len(worker.jobs) == 1)
    job = worker.jobs[0]
    former: list[Frame] = [
        Started(worker_id="dead", num_prompt_tokens=8),
        Beam(beam=0, token_ids=(1, 2, 3), text="old"),
        Beam(beam=1, token_ids=(4,), text="er"),
    ]
    for frame in former:
        await worker.bus.frames.publish(job.reply, [(job.request_id, frame)], batch=True)
    point = front.gateway.streams.resume_point(job.request_id)
    assert point is not None
    assert point.token_ids == ()
    worker.epoch = 1
    worker.gate.set()
    answer = await asked
    assert [choice.message.content for choice in answer.choices] == ["one. two", "one. two!"]


async def test_lost_frames_are_asked_for_again(
    front: RunningGateway, client: openai.AsyncOpenAI
) -> None:
    lost: list[Frame] = []

    def lose(frame: Frame) -> bool:
        if isinstance(frame, Beam) and frame.beam == 1 and not lost:
            lost.append(frame)
            return True
        return False

    front.worker.lose = lose
    answer = await client.chat.completions.create(**_CHAT, n=2, extra_body=_BEAMS)
    assert [choice.message.content for choice in answer.choices] == ["one. two", "one. two!"]
    assert len(front.worker.replays) == 1


async def test_a_failure_is_the_answer(front: RunningGateway, http: httpx.AsyncClient) -> None:
    front.worker.end_with = Failed(code="kv_capacity_exceeded", message="Too long.")
    answer = await http.post("/v1/chat/completions", json=_CHAT | _BEAMS | {"n": 3})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "kv_capacity_exceeded"


async def test_a_client_that_leaves_cancels_the_one_job(front: RunningGateway) -> None:
    front.worker.gate.clear()
    async with httpx.AsyncClient(base_url=front.url, timeout=10) as http:
        asked = asyncio.create_task(
            http.post("/v1/chat/completions", json=_CHAT | _BEAMS | {"n": 4})
        )
        await eventually(lambda: len(front.worker.jobs) == 1)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        await eventually(lambda: len(front.worker.cancelled) == 1)
    await eventually(lambda: len(front.gateway.streams) == 0)

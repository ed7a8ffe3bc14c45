"""Path of one request through the whole system, by every API, to one correct record."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import uuid
from typing import Any

import httpx
import nats
import openai
import pytest

from millrace.bus.api import Bus
from millrace.schemas.control import WorkerStatus
from tests.e2e.clients import Answer, ask_nats, ask_sse, ask_websocket, chat_body
from tests.support.system import System
from tests.support.waiting import eventually

pytestmark = pytest.mark.e2e

QUESTIONS = (
    "What is TTFT?",
    "What happens when a worker dies?",
    "How do I publish a job?",
    "What is a KV cache?",
)


async def test_openai_client_streams_a_sensible_answer(system: System) -> None:
    client = openai.AsyncOpenAI(base_url=f"{system.http}/v1", api_key="none")
    stream = await client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": "What is TTFT?"}],
        temperature=0,
        stream=True,
    )
    pieces = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
    assert len(pieces) > 2, "it did not stream"
    assert "first token" in "".join(pieces).lower()
    await client.close()


async def test_mixed_clients_each_leave_one_row_with_their_usage(
    system: System, http: httpx.AsyncClient, bus: Bus
) -> None:
    run = uuid.uuid4().hex[:8]

    async def ask(i: int) -> Answer:
        question = QUESTIONS[i % len(QUESTIONS)]
        if i % 3 == 0:
            return await ask_websocket(system.websocket, question)
        if i % 3 == 1:
            return await ask_sse(http, question)
        return await ask_nats(bus, f"mixed-{run}-{i}", question)

    answers = await asyncio.gather(*(ask(i) for i in range(32)))
    assert all(answer.finish_reason == "stop" for answer in answers)
    assert len({answer.text for answer in answers}) == len(QUESTIONS)

    ids = ", ".join(f"'{answer.request_id}'" for answer in answers)
    query = (
        "SELECT request_id, count() AS num_rows, any(prompt_tokens) AS prompt_tokens, "
        "any(completion_tokens) AS completion_tokens, any(status) AS status, "
        "any(ttft_ms) AS ttft_ms, any(cost) AS cost "
        f"FROM requests FINAL WHERE request_id IN ({ids}) GROUP BY request_id"
    )
    await eventually(lambda: len(system.sql(query)) == 32, timeout_s=5.0, what="32 rows")
    rows = {row["request_id"]: row for row in system.sql(query)}
    for answer in answers:
        row = rows[answer.request_id]
        assert int(row["num_rows"]) == 1
        assert row["status"] == "done"
        assert row["prompt_tokens"] == answer.prompt_tokens
        assert row["completion_tokens"] == answer.completion_tokens
        assert row["ttft_ms"] > 0
        assert float(row["cost"]) > 0


async def test_a_job_of_another_service_can_be_fetched_later(bus: Bus) -> None:
    request_id = f"later-{uuid.uuid4().hex[:8]}"
    answer = await ask_nats(bus, request_id, "What is TTFT?")
    result = None

    async def stored() -> bool:
        nonlocal result
        result = await bus.results.fetch("local", request_id)
        return result is not None

    await eventually(stored)
    assert result is not None
    assert result.text == answer.text
    assert result.usage is not None
    assert result.usage.completion_tokens == answer.completion_tokens


def test_the_example_of_the_documents_runs(system: System) -> None:
    """Once more with the same id, the same answer; with another question, a refusal."""

    def run(question: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [
                *(sys.executable, "docs/examples/publish_job.py"),
                *(str(system.data / "run" / "nats.env"), question, request_id),
            ],
            capture_output=True,
            text=True,
            timeout=20.0,
            check=False,
        )

    request_id = f"example-{uuid.uuid4().hex}"
    first = run("What is a KV cache?")
    assert first.returncode == 0, first.stderr
    assert len(first.stdout) > 20
    again = run("What is a KV cache?")
    assert (again.returncode, again.stdout) == (0, first.stdout), again.stderr
    assert "used before" in again.stderr
    other = run("What is a lease?")
    assert other.returncode == 1
    assert "RuntimeError: failed duplicate" in other.stderr


async def test_a_service_that_sends_nothing_but_json_is_always_answered(system: System) -> None:
    """The service uses plain nats-py and sends no headers, a repeated id and a malformed job."""
    connection = await nats.connect((system.data / "run" / "nats.url").read_text().strip())
    frames: dict[str, list[str]] = {}

    async def ask(reply: str, **job: Any) -> list[str]:
        """The types of the frames, or the code of a failure, until the end."""
        received = frames.setdefault(reply, [])
        subscription = await connection.subscribe(f"tok.{reply}.>")
        await connection.jetstream().publish(
            "jobs.demo.free", json.dumps(job | {"model": "demo", "reply": reply}).encode()
        )
        while not {"done", "duplicate", "malformed_message"}.intersection(received):
            frame = json.loads((await subscription.next_msg(30.0)).data)
            received.append(frame.get("code") or frame["type"])
        await subscription.unsubscribe()
        return received

    request_id = f"json-{uuid.uuid4().hex[:8]}"
    question = {"prompt": "What is TTFT?", "sampling": {"max_tokens": 4}}
    assert "delta" in await ask("first", request_id=request_id, **question)

    again = await ask("again", request_id=request_id, **question)
    assert list(dict.fromkeys(again)) == ["started", "delta", "usage", "done"]
    other = {**question, "prompt": "What is a lease?"}
    assert await ask("other", request_id=request_id, **other) == ["duplicate"]
    assert await ask("nameless", request_id="", **question) == ["malformed_message"]
    assert await ask("wrong", request_id="w", prompt=7) == ["malformed_message"]
    await connection.close()


async def test_a_service_s_chat_calls_tools_as_over_http(
    system: System, http: httpx.AsyncClient
) -> None:
    body: dict[str, Any] = {
        "model": "demo",
        "messages": [{"role": "user", "content": "What is TTFT?"}],
        "tools": [
            {
                "type": "function",
                "function": {
                    "name": "look_up",
                    "parameters": {
                        "type": "object",
                        "properties": {"term": {"type": "string", "maxLength": 12}},
                        "required": ["term"],
                        "additionalProperties": False,
                    },
                },
            }
        ],
        "tool_choice": "required",
        "temperature": 0,
        "max_completion_tokens": 100,
    }
    answer = await http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    connection = await nats.connect((system.data / "run" / "nats.url").read_text().strip())
    request_id = f"calls-{uuid.uuid4().hex[:8]}"
    subscription = await connection.subscribe(f"tok.local.{request_id}")
    job = body | {"request_id": request_id, "reply": "local", "stream": True, "user": None}
    await connection.jetstream().publish("jobs.demo.free.local", json.dumps(job).encode())
    arguments, names, frame = "", [], {"type": ""}
    while frame["type"] not in ("done", "failed"):
        frame = json.loads((await subscription.next_msg(30.0)).data)
        for call in frame.get("tool_calls", ()):
            arguments += call["function"]["arguments"]
            names += [call["function"]["name"]] if "name" in call["function"] else []
        assert not frame.get("text")
    assert (frame["type"], frame["finish_reason"]) == ("done", choice["finish_reason"])
    (called,) = choice["message"]["tool_calls"]
    assert {"name": names[0], "arguments": arguments} == called["function"]
    await connection.close()


async def test_closing_a_client_frees_its_blocks(http: httpx.AsyncClient, bus: Bus) -> None:
    latest: list[WorkerStatus] = []
    watch = await bus.workers.watch(latest.append)
    await eventually(lambda: bool(latest) and latest[-1].num_running == 0)
    baseline = latest[-1].num_free_blocks
    body = chat_body("What is TTFT?", stream=True, max_tokens=1500, ignore_eos=True)
    async with http.stream("POST", "/v1/chat/completions", json=body) as response:
        lines = response.aiter_lines()
        assert (await anext(lines)).startswith("data: ")
        await eventually(lambda: latest[-1].num_running == 1)
        assert latest[-1].num_free_blocks < baseline
    await eventually(
        lambda: latest[-1].num_running == 0 and latest[-1].num_free_blocks == baseline,
        what="the pool at its baseline",
    )
    await watch.close()

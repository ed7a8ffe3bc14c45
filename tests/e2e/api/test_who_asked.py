"""Key, API and metadata in the row of a request, for every entry point."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec
import openai
import pytest
from websockets.asyncio.client import connect

from millrace.bus.api import Bus
from millrace.schemas.jobs import ChatMessage, Job
from millrace.schemas.sampling import SamplingParams
from tests.support.system import System
from tests.support.waiting import eventually

pytestmark = pytest.mark.e2e

_SHORT = {"model": "demo", "max_tokens": 4}
_MESSAGES = [{"role": "user", "content": "What is TTFT?"}]


@dataclass(frozen=True)
class KeyedClient:
    """Client with a key; ``note`` in the metadata identifies a request."""

    system: System
    http: httpx.AsyncClient
    bus: Bus
    tenant: str
    key: str
    key_id: str

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.key}"}

    async def post(self, path: str, note: str, **fields: Any) -> None:
        body = {**_SHORT, **fields, "metadata": {"note": note}}
        answer = await self.http.post(path, json=body, headers=self.headers)
        assert answer.status_code == 200, answer.text

    async def chat(self, note: str) -> None:
        await self.post("/v1/chat/completions", note, messages=_MESSAGES)

    async def completion(self, note: str) -> None:
        await self.post("/v1/completions", note, prompt="What is TTFT?")

    async def response(self, note: str) -> None:
        fields = {"model": "demo", "input": "What is TTFT?", "max_output_tokens": 16}
        body = {**fields, "metadata": {"note": note}}
        answer = await self.http.post("/v1/responses", json=body, headers=self.headers)
        assert answer.status_code == 200, answer.text

    async def message(self, note: str) -> None:
        body = {**_SHORT, "messages": _MESSAGES}
        answer = await self.http.post("/v1/messages", json=body, headers=self.headers)
        assert answer.status_code == 200, answer.text

    async def streamed(self, note: str) -> None:
        await self.post("/v1/chat/completions", note, messages=_MESSAGES, stream=True)

    async def calling(self, path: str, fields: dict[str, Any]) -> Any:
        """An answer that has to call the tool ``look``."""
        body = {"model": "demo", "temperature": 0, **fields}
        answer = await self.http.post(path, json=body, headers=self.headers, timeout=60.0)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def socket(self, note: str) -> None:
        asked = {"type": "generate", "id": "a", "messages": _MESSAGES, "metadata": {"note": note}}
        async with (
            asyncio.timeout(30.0),
            connect(self.system.websocket, additional_headers=self.headers) as socket,
        ):
            await socket.send(json.dumps(asked | _SHORT))
            while json.loads(await socket.recv())["type"] not in ("done", "error"):
                pass

    async def batch(self, note: str) -> None:
        body = {**_SHORT, "messages": _MESSAGES, "metadata": {"note": note}}
        line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
        base_url = f"{self.system.http}/v1"
        async with openai.AsyncOpenAI(base_url=base_url, api_key=self.key) as client:
            data = ("a.jsonl", json.dumps(line).encode())
            file = await client.files.create(file=data, purpose="batch")
            batch = await client.batches.create(
                input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
            )

            async def is_over() -> bool:
                return (await client.batches.retrieve(batch.id)).status == "completed"

            await eventually(is_over, 30.0, "the batch's end")

    async def job(self, note: str) -> None:
        """Publish a job with a key id: a service names its own customers' keys."""
        job = Job(
            request_id=f"job-{uuid.uuid4().hex}",
            model="demo",
            tenant=self.tenant,
            messages=(ChatMessage(role="user", content="What is TTFT?"),),
            sampling=SamplingParams(max_tokens=4),
            key_id=self.key_id,
            metadata={"note": note},
        )
        await self.bus.jobs.publish(job)


@pytest.fixture
def client(system: System, http: httpx.AsyncClient, bus: Bus) -> KeyedClient:
    tenant = f"tenant-{uuid.uuid4().hex[:8]}"
    create = ("keys", "create", "--tenant", tenant, "--json", "--data", str(system.data))
    made = json.loads(
        subprocess.run(
            [sys.executable, "-m", "millrace", *create], capture_output=True, check=True, timeout=60
        ).stdout
    )
    return KeyedClient(system, http, bus, tenant, made["key"], made["key_id"])


async def test_each_door_leaves_key_and_metadata_in_the_row(client: KeyedClient) -> None:
    entry_points: list[Callable[[str], Awaitable[None]]] = [
        *(client.chat, client.completion, client.response),
        *(client.socket, client.batch, client.job),
    ]
    names = [entry_point.__name__ for entry_point in entry_points]
    await asyncio.gather(
        *(entry_point(name) for entry_point, name in zip(entry_points, names, strict=True))
    )
    rows: list[dict[str, Any]] = []

    async def are_stored() -> bool:
        rows[:] = client.system.sql(
            "SELECT metadata['note'] AS note, key_id, toInt64(count()) AS requests "
            f"FROM requests_once WHERE tenant = '{client.tenant}' GROUP BY note, key_id"
        )
        return len(rows) >= len(entry_points)

    await eventually(are_stored, 30.0, "a row for each door")
    assert {row["note"]: row["key_id"] for row in rows} == dict.fromkeys(names, client.key_id)


async def test_each_door_leaves_how_it_was_asked_in_the_row(client: KeyedClient) -> None:
    """The job of a service has no ``reply``, so no client reads its tokens as they come."""
    entry_points = [
        *(client.chat, client.streamed, client.completion, client.response, client.message),
        *(client.socket, client.batch, client.job),
    ]
    await asyncio.gather(*(entry_point(entry_point.__name__) for entry_point in entry_points))
    rows: list[dict[str, Any]] = []

    async def are_stored() -> bool:
        rows[:] = client.system.sql(
            "SELECT api, stream, max_tokens, num_tool_calls, finish_reason, "
            "isNull(deadline_at) OR deadline_at > received_at AS ok FROM requests FINAL "
            f"WHERE tenant = '{client.tenant}' ORDER BY api, stream, tier"
        )
        return len(rows) >= len(entry_points)

    await eventually(are_stored, 30.0, "a row for each door")
    assert [(row["api"], row["stream"], row["max_tokens"]) for row in rows] == [
        ("chat", False, 4),
        ("chat", False, 4),
        ("chat", True, 4),
        ("completions", False, 4),
        ("job", False, 4),
        ("messages", False, 4),
        ("responses", False, 16),
        ("websocket", True, 4),
    ]
    assert all(row["ok"] for row in rows)
    assert {(row["num_tool_calls"], row["finish_reason"]) for row in rows} == {(0, "length")}


_PARAMETERS = {
    "type": "object",
    "properties": {"on": {"type": "boolean"}},
    "required": ["on"],
    "additionalProperties": False,
}
_FORCED: dict[str, Any] = {
    "model": "demo",
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "temperature": 0,
}
_FUNCTION = {"name": "look", "parameters": _PARAMETERS}


async def test_a_row_of_a_tool_call_says_what_its_client_was_told(client: KeyedClient) -> None:
    tool = {"type": "function", "function": _FUNCTION}
    path = "/v1/chat/completions"
    asked = _FORCED | {"messages": _MESSAGES, "tools": [tool], "max_tokens": 60}
    answer = await client.calling(path, asked)
    assert answer["choices"][0]["finish_reason"] == "tool_calls"
    cut = await client.calling(path, asked | {"max_tokens": 3})
    assert cut["choices"][0]["finish_reason"] == "length"
    text = await client.calling(path, asked | {"tool_choice": "none", "max_tokens": 2})
    assert text["choices"][0]["finish_reason"] == "length"
    response = await client.calling(
        "/v1/responses",
        {
            "input": "Look!",
            "tool_choice": "required",
            "parallel_tool_calls": False,
            "tools": [{"type": "function", **_FUNCTION}],
            "max_output_tokens": 60,
        },
    )
    assert [item["type"] for item in response["output"]] == ["function_call"]
    message = await client.calling(
        "/v1/messages",
        {
            "messages": _MESSAGES,
            "tools": [{"name": "look", "input_schema": _PARAMETERS}],
            "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
            "max_tokens": 60,
        },
    )
    assert message["stop_reason"] == "tool_use"
    await client.bus.jobs.publish(
        Job(
            request_id=f"job-{uuid.uuid4().hex}",
            model="demo",
            tenant=client.tenant,
            body=msgspec.msgpack.encode(asked),
        )
    )
    rows: list[dict[str, Any]] = []

    async def are_stored() -> bool:
        rows[:] = client.system.sql(
            "SELECT api, finish_reason, num_tool_calls, "
            "arrayStringConcat(called_tools, ' ') AS tools "
            f"FROM requests FINAL WHERE tenant = '{client.tenant}' "
            "ORDER BY api, num_tool_calls, completion_tokens"
        )
        return len(rows) == 6

    await eventually(are_stored, 60.0, "a row for each answer")
    of_chat = [tuple(row.values()) for row in rows if row["api"] == "chat"]
    assert of_chat[0] == ("chat", "length", 0, "")
    assert max(of_chat[1:]) == ("chat", "tool_calls", 1, "look")
    assert {row[1] for row in of_chat} == {"length", "tool_calls"}
    assert [tuple(row.values()) for row in rows if row["api"] != "chat"] == [
        ("job", "tool_calls", 1, "look"),
        ("messages", "tool_calls", 1, "look"),
        ("responses", "tool_calls", 1, "look"),
    ]

"""Tool rounds that another gateway continues."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from millrace.gateway.tools.catalogue import load_tools
from millrace.schemas.config import RedisConfig
from millrace.schemas.jobs import Job
from tests.gateway.resuming.clients import CONFIG, Pair, opened, send, until
from tests.support.running_gateway import MODEL, running_gateway
from tests.support.tool_server import reply, tool_server
from tests.support.waiting import eventually


def call_then_say(job: Job) -> str:
    """The first round calls a tool, the second one speaks."""
    if job.request_id.endswith("-r1"):
        return "It rains."
    return '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>'


@pytest.mark.parametrize("dies", [False, True])
async def test_a_tool_runs_once_though_its_client_goes_elsewhere(
    tmp_path: Path, redis: RedisConfig, dies: bool
) -> None:
    """The other gateway reads the first round again and uses the recorded tool result."""
    file = tmp_path / "tools.yaml"
    async with tool_server() as server, AsyncExitStack() as stack:
        server.answers["/weather"] = reply('{"sky": "rain"}')
        file.write_text(
            f"tools:\n  weather:\n    url: {server.url('/weather')}\n    allow_private: true\n"
            "    parameters: {type: object, properties: {city: {type: string}}}\n"
        )
        tools = load_tools(str(file), {})
        first = await stack.enter_async_context(
            running_gateway(CONFIG, gateway_id="gw-1", redis=redis, tools=tools)
        )
        second = await stack.enter_async_context(
            running_gateway(
                CONFIG, gateway_id="gw-2", redis=redis, tools=tools, broker=first.broker
            )
        )
        pair = Pair(first, second)
        await eventually(lambda: bool(second.gateway.fleet.live_workers()))
        pair.worker.script = call_then_say
        num_tokens = 0
        async with opened(first) as socket:
            messages = [{"role": "user", "content": "Rain?"}]
            await send(
                socket,
                "generate",
                id="a",
                model=MODEL,
                messages=messages,
                server_tools=["weather"],
            )
            seen = await until(socket, "tool_step")
            num_tokens = sum(m["num_tokens"] for m in seen if m["type"] == "delta")
            if dies:
                await pair.kill_first()
            socket.transport.abort()
        async with opened(second) as socket:
            await send(
                socket,
                "resume",
                id="b",
                request_id=seen[0]["request_id"],
                next_index=num_tokens,
            )
            rest = await until(socket, "done")
    assert "".join(m["text"] for m in rest if m["type"] == "delta") == "It rains."
    steps = [m["call_id"] for m in rest if m["type"] == "tool_step"]
    assert steps in ([], [seen[-1]["call_id"]])
    assert len(server.seen) == 1
    assert len(pair.worker.jobs) == 2

"""Whole system on a server that offers plain completions only and writes scripted text.

Agents send their default requests, and features that the server lacks are refused or reported.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from millrace.bus import nats as nats_bus
from millrace.schemas.config import NatsConfig
from millrace.schemas.jobs import ChatMessage, Job
from millrace.schemas.notices import NOTICE_NAME, Notice, NoticeCode
from millrace.schemas.sampling import SamplingOptions
from tests.clients.packages import python_packages
from tests.registry.test_reasoning import SWITCHED
from tests.support.engine.checkpoints_made import write_checkpoint
from tests.support.openai_server import OpenAiServer
from tests.support.repository import ROOT
from tests.support.system import System
from tests.support.waiting import eventually

pytestmark = pytest.mark.e2e

_CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
_SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
_ASKED = [{"role": "user", "content": "How is the weather in Oslo?"}]
_STRICT = ["strict_not_enforced"]


def chat(**more: Any) -> dict[str, Any]:
    function = {"name": "weather", "parameters": _SCHEMA, "strict": True}
    tools = [{"type": "function", "function": function}]
    return {"model": "demo", "messages": _ASKED, "tools": tools} | more


def responses(**more: Any) -> dict[str, Any]:
    tools = [{"type": "function", "name": "weather", "parameters": _SCHEMA, "strict": True}]
    return {"model": "demo", "input": _ASKED, "tools": tools, "store": False} | more


def messages(**more: Any) -> dict[str, Any]:
    tools = [{"name": "weather", "input_schema": _SCHEMA, "strict": True}]
    return {"model": "demo", "messages": _ASKED, "max_tokens": 200, "tools": tools} | more


@pytest.fixture(scope="module")
def server() -> Iterator[OpenAiServer]:
    with OpenAiServer().running() as running:
        yield running


@pytest.fixture(scope="module")
def system(server: OpenAiServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    arguments = ("--port", "0", "--engine", "openai", "--engine-url", server.url)
    running = System(tmp_path_factory.mktemp("scripted") / "data", arguments).start()
    yield running
    assert running.stop() == 0


@pytest.fixture
async def http(system: System) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=system.http, timeout=30.0, trust_env=False) as client:
        yield client


def _codes(answer: httpx.Response) -> list[str]:
    assert answer.status_code == 200, answer.text
    return [one["code"] for one in answer.json().get(NOTICE_NAME, [])]


async def test_one_call_ends_the_answer_and_the_server_s_stream(
    server: OpenAiServer, http: httpx.AsyncClient
) -> None:
    server.script = lambda _prompt: f"I look.\n{_CALL}\n" + f"{_CALL}\n" * 50
    server.event_s = 0.005
    asked: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", chat(parallel_tool_calls=False)),
        ("/v1/responses", responses(parallel_tool_calls=False)),
        ("/v1/messages", messages(tool_choice={"type": "auto", "disable_parallel_tool_use": True})),
    ]
    results = []
    for path, body in asked:
        answer = await http.post(path, json=body)
        assert _codes(answer) == _STRICT
        results.append(answer.json())
        assert server.num_written < 1_000, path
    server.event_s = 0.0
    (choice,) = results[0]["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert (call["function"]["name"], choice["finish_reason"]) == ("weather", "tool_calls")
    assert json.loads(call["function"]["arguments"]) == {"city": "Oslo"}
    assert choice["message"]["content"] == "I look."
    num_tokens = results[0]["usage"]["completion_tokens"]
    assert 10 < num_tokens < len(f"I look.\n{_CALL}")
    assert [item["type"] for item in results[1]["output"]] == ["message", "function_call"]
    assert results[1]["usage"]["output_tokens"] == num_tokens
    assert [block["type"] for block in results[2]["content"]] == ["text", "tool_use"]
    assert (results[2]["stop_reason"], results[2]["usage"]["output_tokens"]) == (
        "tool_use",
        num_tokens,
    )
    several = (await http.post("/v1/chat/completions", json=chat(max_tokens=400))).json()
    assert len(several["choices"][0]["message"]["tool_calls"]) > 3


async def test_strict_calls_are_checked_behind(
    server: OpenAiServer, http: httpx.AsyncClient
) -> None:
    server.script = lambda _prompt: _CALL
    for path, body in (
        ("/v1/chat/completions", chat()),
        ("/v1/responses", responses()),
        ("/v1/messages", messages()),
    ):
        server.script = lambda _prompt: _CALL
        assert _codes(await http.post(path, json=body)) == _STRICT
        server.script = lambda _prompt: _CALL.replace('"Oslo"', "7")
        answer = await http.post(path, json=body)
        assert _codes(answer) == [*_STRICT, "strict_violated"]
        (_, violated) = answer.json()[NOTICE_NAME]
        assert violated["detail"] == "weather: $.city: 7 is not of type 'string'"
    async with http.stream("POST", "/v1/chat/completions", json=chat(stream=True)) as answer:
        lines = [line async for line in answer.aiter_lines() if line.startswith("data: {")]
    assert "strict_violated" in lines[-1]


_FORMAT = {"name": "weather", "schema": _SCHEMA, "strict": True}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions", chat(tool_choice="required"), "tool_choice"),
        (
            "/v1/chat/completions",
            chat(tool_choice={"type": "function", "function": {"name": "weather"}}),
            "tool_choice",
        ),
        (
            "/v1/chat/completions",
            chat(response_format={"type": "json_schema", "json_schema": _FORMAT}),
            "response_format.json_schema.schema",
        ),
        (
            "/v1/chat/completions",
            chat(tools=[], response_format={"type": "json_object"}),
            "response_format",
        ),
        ("/v1/chat/completions", chat(tools=[], guided_regex="a+"), "guided_regex"),
        ("/v1/completions", {"model": "demo", "prompt": "x", "guided_json": {}}, "guided_json"),
        (
            "/v1/completions",
            {"model": "demo", "prompt": "x", "structured_outputs": {"choice": ["a"]}},
            "structured_outputs.choice",
        ),
        ("/v1/responses", responses(tool_choice="required"), "tool_choice"),
        (
            "/v1/responses",
            responses(tools=[], text={"format": {"type": "json_schema", **_FORMAT}}),
            "text.format.schema",
        ),
        ("/v1/messages", messages(tool_choice={"type": "any"}), "tool_choice"),
        (
            "/v1/messages",
            messages(output_config={"format": {"type": "json_schema", "schema": _SCHEMA}}),
            "output_config.format.schema",
        ),
    ],
)
async def test_what_demands_a_grammar_is_refused_by_its_name(
    http: httpx.AsyncClient, path: str, body: dict[str, Any], param: str
) -> None:
    answer = await http.post(path, json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["message"] == (
        "The openai engine of this model holds no answer to a schema, a pattern or a demanded tool "
        f"call; leave {param} out."
    )
    if path != "/v1/messages":
        assert error["param"] == param


async def test_a_model_that_is_added_while_the_system_runs_thinks_without_a_bound(
    server: OpenAiServer, system: System, http: httpx.AsyncClient, tmp_path: Path
) -> None:
    tiny = write_checkpoint(
        tmp_path / "tiny", chat_template=SWITCHED, special_tokens=["<think>", "</think>"]
    )
    server.script = lambda _prompt: "<think>Hm, let me see what it is.</think>Yes."
    added = subprocess.run(
        [
            *(sys.executable, "-m", "millrace.cli", "models", "add", "thinker"),
            *("--model", str(tiny), "--engine", "openai", "--engine-url", server.url),
            *("--data", str(system.data)),
        ],
        capture_output=True,
        text=True,
        timeout=60.0,
        check=False,
    )
    assert added.returncode == 0, added.stderr
    asked: list[tuple[str, dict[str, Any], str]] = [
        ("/v1/chat/completions", {"thinking_token_budget": 2}, "thinking_token_budget"),
        ("/v1/responses", {"thinking_token_budget": 2}, "thinking_token_budget"),
        (
            "/v1/messages",
            {"thinking": {"type": "enabled", "budget_tokens": 2}},
            "thinking.budget_tokens",
        ),
        (
            "/v1/messages",
            {"thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}},
            "",
        ),
        ("/v1/messages", {"thinking": {"type": "enabled"}}, ""),
        ("/v1/chat/completions", {"reasoning_effort": "low"}, ""),
        ("/v1/responses", {"reasoning": {"effort": "low"}}, ""),
    ]
    for path, fields, param in asked:
        plain: dict[str, Any] = {"model": "thinker", "messages": _ASKED}
        plain |= {"max_tokens": 100} if path == "/v1/messages" else {}
        if path == "/v1/responses":
            plain = {"model": "thinker", "input": _ASKED, "store": False}
        answer = await http.post(path, json=plain | fields)
        assert _codes(answer) == (["budget_not_enforced"] if param else []), answer.text
        if param:
            assert answer.json()[NOTICE_NAME] == [{"code": "budget_not_enforced", "param": param}]
            assert f'budget_not_enforced;param="{param}"' in answer.headers[NOTICE_NAME]
        assert "let me see" in answer.text
        demo = await http.post(path, json=plain | fields | {"model": "demo"})
        assert _codes(demo) == []
    bus = await nats_bus.connect(NatsConfig(url=system.endpoints["nats"]), "test")
    try:
        job = Job(
            request_id=uuid.uuid4().hex,
            model="thinker",
            messages=(ChatMessage("user", "Yes?"),),
            sampling=SamplingOptions(max_reasoning_tokens=2, max_tokens=100),
            store_result=True,
        )
        await bus.jobs.publish(job)

        async def result() -> bool:
            stored = await bus.results.fetch(job.tenant, job.request_id)
            return stored is not None and stored.notices == (
                Notice(NoticeCode.BUDGET_NOT_ENFORCED, "max_reasoning_tokens"),
            )

        await eventually(result, timeout_s=30.0)
    finally:
        await bus.close()


def _steps(prompt: str) -> str:
    """Write what a model says that does one step of the work after the other."""
    done = max((step for step in range(1, 5) if f"done {step}" in prompt), default=0)
    if done == 4:
        return "All is done."
    return f'<tool_call>\n{{"name": "work", "arguments": {{"step": {done + 1}}}}}\n</tool_call>'


@pytest.mark.slow(reason="runs two agents' frameworks, in environments of their own")
@pytest.mark.parametrize(
    ("script", "packages"),
    [
        ("openai_agents_loop.py", ("openai-agents", "openai-agents==0.24.0")),
        ("pydantic_ai_loop.py", ("pydantic-ai", "pydantic-ai-slim[openai,anthropic]==2.68.0")),
    ],
)
async def test_a_loop_of_tools_by_an_agents_framework(
    server: OpenAiServer, system: System, tmp_path: Path, script: str, packages: tuple[str, ...]
) -> None:
    server.script = _steps
    python = python_packages(*packages) / "python"
    run = [str(python), str(ROOT / "tests" / "clients" / script), system.http]
    sent = tmp_path / "sent"
    ran = await asyncio.to_thread(
        subprocess.run,
        [*run, str(sent)],
        capture_output=True,
        text=True,
        timeout=120.0,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    bodies = sent.read_text().splitlines()
    assert len(bodies) == 4 * 5
    assert sum('"strict":true' in body for body in bodies) >= 10
    assert sum('"parallel_tool_calls":false' in body for body in bodies) == 10

"""A prompt that is too long, as each API's own clients read it, on the demo's real tokenizer."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import httpx
import openai
import pytest
from websockets.asyncio.client import connect

from millrace.bus.tenancy.tenants import TenantStore
from millrace.gateway.models import LoadedModels
from millrace.registry.catalogue import load_catalogue
from millrace.registry.served import ServedModel
from millrace.runtime.redis.link import RedisLink
from millrace.schemas.config import GatewayConfig, RedisConfig
from millrace.schemas.errors import ContextLengthError
from millrace.schemas.frames import Failed
from millrace.schemas.models.cards import ModelCard
from millrace.schemas.tenants import LimitOverrides
from tests.support.batches.batch_system import batch_gateway, in_memory
from tests.support.running_gateway import MODEL, RunningGateway, running_gateway
from tests.support.servers import RedisServer

_WINDOW = 2_048
_HELLO: Any = [{"role": "user", "content": "Hello there, miller."}]
_SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}}}
_NAMES = [f"look_up_the_record_of_number_{number}" for number in range(120)]
_CHAT_TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": _SCHEMA}} for name in _NAMES
]
_RESPONSES_TOOLS: Any = [
    {"type": "function", "name": name, "parameters": _SCHEMA} for name in _NAMES
]
_MESSAGES_TOOLS: Any = [{"name": name, "input_schema": _SCHEMA} for name in _NAMES]
# Claude Code's own two expressions.
_LOWERS_MAX_TOKENS = re.compile(
    r"input length and `max_tokens` exceed context limit: (\d+) \+ (\d+) > (\d+)"
)
_COMPACTS = re.compile(r"prompt is too long[^0-9]*(\d+)\s*tokens?\s*>\s*(\d+)")


@pytest.fixture(scope="module")
def demo() -> ServedModel:
    return ServedModel.load(load_catalogue(""), "demo")


@pytest.fixture
def models(demo: ServedModel) -> LoadedModels:
    card = ModelCard(id=MODEL, created=0, max_model_len=None)
    return LoadedModels({MODEL: card}, lambda _name: demo)


@pytest.fixture
async def front(models: LoadedModels) -> AsyncIterator[RunningGateway]:
    async with running_gateway(models=models) as running:
        running.worker.script = lambda _job: ["Well", ", ", "it ", "turns."]
        yield running


@pytest.fixture
async def claude(front: RunningGateway) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=front.url, api_key="none", timeout=10) as made:
        yield made


def _error_of(caught: pytest.ExceptionInfo[Any]) -> dict[str, Any]:
    body: dict[str, Any] = caught.value.response.json()
    error: dict[str, Any] = body["error"]
    return error


@pytest.mark.parametrize("stream", [False, True])
async def test_claude_code_lowers_max_tokens(
    claude: anthropic.AsyncAnthropic, stream: bool
) -> None:
    ask: Any = {"model": MODEL, "messages": _HELLO}
    with pytest.raises(anthropic.BadRequestError) as caught:
        await claude.messages.create(**ask, max_tokens=32_000, stream=stream)
    error = _error_of(caught)
    found = _LOWERS_MAX_TOKENS.match(error["message"])
    assert found is not None, error
    count = await claude.messages.count_tokens(**ask)
    assert found.groups() == (str(count.input_tokens), "32000", str(_WINDOW))
    assert error["message"].endswith("decrease input length or `max_tokens` and try again")
    assert (error["type"], error["code"], error["param"]) == (
        "invalid_request_error",
        "context_length_exceeded",
        "messages",
    )
    # As Claude Code asks again.
    left = _WINDOW - count.input_tokens - 1_000
    assert (await claude.messages.create(**ask, max_tokens=left)).type == "message"


async def test_claude_code_compacts_and_blames_the_tools(
    claude: anthropic.AsyncAnthropic,
) -> None:
    ask: Any = {
        "model": MODEL,
        "messages": _HELLO,
        "tools": _MESSAGES_TOOLS,
        "system": "Be short.",
    }
    with pytest.raises(anthropic.BadRequestError) as caught:
        await claude.messages.create(**ask, max_tokens=100)
    message = _error_of(caught)["message"]
    count = (await claude.messages.count_tokens(**ask)).input_tokens
    found = _COMPACTS.match(message)
    assert found is not None, message
    assert found.groups() == (str(count), str(_WINDOW))
    tools = re.search(
        r"In the prompt: 120 tools take (\d+) tokens, system messages \d+ tokens", message
    )
    assert tools is not None, message
    without: Any = {name: value for name, value in ask.items() if name != "tools"}
    assert int(tools[1]) == count - (await claude.messages.count_tokens(**without)).input_tokens


@pytest.mark.parametrize("stream", [False, True])
async def test_a_worker_with_a_smaller_window_refuses_the_prompt(
    front: RunningGateway, claude: anthropic.AsyncAnthropic, stream: bool
) -> None:
    """A worker with a smaller window refuses, before a first token and behind it."""
    refused = ContextLengthError(900, 200, 1_000).message
    front.worker.end_with = Failed(code="context_length_exceeded", message=refused)
    front.worker.stop_before = 3 if stream else None

    async def read() -> None:
        answer: Any = await claude.messages.create(
            model=MODEL, messages=_HELLO, max_tokens=200, stream=stream
        )
        async for _ in answer:
            pass

    with pytest.raises(anthropic.APIStatusError) as caught:
        await read()
    body: Any = caught.value.body
    found = _LOWERS_MAX_TOKENS.match(body["error"]["message"])
    assert found is not None, body
    assert found.groups() == ("900", "200", "1000")
    assert body["error"]["type"] == "invalid_request_error"


async def test_openais_clients(front: RunningGateway) -> None:
    async with openai.AsyncOpenAI(base_url=f"{front.url}/v1", api_key="none", timeout=10) as client:
        with pytest.raises(openai.BadRequestError) as in_chat:
            await client.chat.completions.create(
                model=MODEL, messages=_HELLO, tools=_CHAT_TOOLS, max_tokens=9, stream=True
            )
        with pytest.raises(openai.BadRequestError) as in_responses:
            await client.responses.create(model=MODEL, input="Hello.", tools=_RESPONSES_TOOLS)
        with pytest.raises(openai.BadRequestError) as in_completions:
            await client.completions.create(model=MODEL, prompt="Hello.", max_tokens=5_000)
        with pytest.raises(openai.BadRequestError) as in_second:
            await client.completions.create(
                model=MODEL, prompt=["Hello.", "mill " * 1_500], max_tokens=2_000
            )
    for caught, param in (
        (in_chat, "messages"),
        (in_responses, "input"),
        (in_completions, "prompt"),
        (in_second, "prompt[1]"),
    ):
        error = caught.value
        assert (error.code, error.type, error.param) == (
            "context_length_exceeded",
            "invalid_request_error",
            param,
        )
        begins = f"This model's maximum context length is {_WINDOW} tokens. However, "
        assert _error_of(caught)["message"].startswith(begins)
    message = _error_of(in_chat)["message"]
    assert re.search(
        r"requested \d+ tokens \(\d+ in the messages, \d+ in the functions, and 9 in", message
    )
    for caught in (in_chat, in_responses):
        assert "In the prompt: 120 tools take " in _error_of(caught)["message"]


async def test_over_a_socket(front: RunningGateway) -> None:
    async with connect(front.ws_url, subprotocols=["millrace.v1"]) as socket:  # type: ignore[list-item]
        ask = {"type": "generate", "id": "a", "model": MODEL, "messages": _HELLO}
        await socket.send(json.dumps(ask | {"tools": _CHAT_TOOLS}))
        async with asyncio.timeout(5.0):
            error = json.loads(await socket.recv())
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
    assert "In the prompt: 120 tools take " in error["message"]


async def test_what_a_key_may_hold(models: LoadedModels, redis_server: RedisServer) -> None:
    redis = RedisConfig(url=redis_server.url)
    link = RedisLink(redis)
    _, token = await TenantStore(link).create_key(
        "acme", 0, limits=LimitOverrides(context_tokens=500)
    )
    await link.close()
    async with (
        running_gateway(GatewayConfig(auth="required"), models, redis=redis) as front,
        httpx.AsyncClient(base_url=front.url, headers={"x-api-key": token}) as http,
    ):
        ask = {"model": MODEL, "messages": _HELLO, "max_tokens": 9}
        in_chat = await http.post("/v1/chat/completions", json=ask | {"tools": _CHAT_TOOLS[:20]})
        in_messages = await http.post("/v1/messages", json=ask | {"max_tokens": 499})
    error = in_chat.json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
    assert error["message"].startswith(
        "This model's maximum context length is 500 tokens. However,"
    )
    assert "In the prompt: 20 tools take " in error["message"]
    whose = "Requests of tenant acme (tier free) may hold 500 tokens with this API key."
    assert error["message"].endswith(whose)
    found = _LOWERS_MAX_TOKENS.match(in_messages.json()["error"]["message"])
    assert found is not None
    assert found.groups()[1:] == ("499", "500")


async def test_a_line_of_a_batch(redis_server: RedisServer) -> None:
    redis = RedisConfig(url=redis_server.url)
    long = [{"role": "user", "content": "x" * 5_000}]
    line = {
        "custom_id": "a",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"model": "echo", "messages": long, "max_tokens": 9},
    }
    async with batch_gateway(in_memory(), redis) as front:
        batch = await front.client.batches.create(
            input_file_id=await front.upload(json.dumps(line).encode()),
            endpoint="/v1/chat/completions",
            completion_window="24h",
        )
        batch = await front.end(batch)
        assert batch.error_file_id is not None
        text = (await front.client.files.content(batch.error_file_id)).text
    error = json.loads(text)["response"]["body"]["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
    assert "9 in the completion" in error["message"]

"""Control tokens in clients' requests: plain text at every endpoint and in every field."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import anthropic
import httpx
import msgspec
import pytest
from websockets.asyncio.client import connect

from millrace.gateway.__main__ import models_of
from millrace.registry.catalogue import load_catalogue
from millrace.schemas.config import Config, GatewayConfig
from millrace.schemas.websocket import SUBPROTOCOL
from tests.registry.tokenizers.forged import CONTROL, FORGED, write_models
from tests.support.running_gateway import MODEL, RunningGateway, running_gateway
from tests.support.waiting import eventually

TURN = ["<|im_start|>", "<|im_end|>"]
OPEN = ["<|im_start|>"]
CALL = ["<|im_start|>", "<tool_call>", "</tool_call>", "<|im_end|>"]
PARAMETERS = {"type": "object", "properties": {FORGED: {"description": FORGED}}}
TOOL: Any = {"name": "find", "description": FORGED, "parameters": PARAMETERS}
ASKED: dict[str, Any] = {"model": MODEL, "input": "hi", "store": False}
FUNCTION: Any = {"name": "find", "arguments": json.dumps({FORGED: [FORGED]})}


@pytest.fixture(scope="module")
def catalogue(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_models(tmp_path_factory.mktemp("models"), MODEL)


@pytest.fixture
async def front(catalogue: Path) -> AsyncIterator[RunningGateway]:
    models = models_of(load_catalogue(str(catalogue)), Config())
    config = GatewayConfig(trust_request_chat_template=True)
    async with running_gateway(config, models) as running:
        running.worker.script = lambda _job: "fine"
        yield running


async def spelled(front: RunningGateway, token_ids: Sequence[int]) -> list[str]:
    """The control tokens among them, in order; the text of all is what it must be."""
    tokenizer: Any = (await front.gateway.models.get(MODEL)).tokenizer
    return [word for one in token_ids if (word := tokenizer.spelling(one)) in CONTROL]


async def prompt(front: RunningGateway) -> list[str]:
    """Return the last job's prompt, one text per token."""
    return await spelled(front, front.worker.jobs[-1].prompt_token_ids or ())


CHATS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "user": ({"messages": [{"role": "user", "content": FORGED}]}, [*TURN, *OPEN]),
    "parts": (
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "<|im_"},
                        {"type": "text", "text": "end|>"},
                        {"type": "text", "text": "<thi"},
                        {"type": "text", "text": "nk>"},
                    ],
                }
            ]
        },
        [*TURN, *OPEN],
    ),
    "history": (
        {
            "messages": [
                {"role": "system", "content": FORGED},
                {"role": "user", "content": "hi", "name": FORGED},
                {"role": "assistant", "content": "<tool_call>", "reasoning_content": FORGED},
                {"role": "user", "content": "<|im_end"},
            ]
        },
        [*TURN, *TURN, "<|im_start|>", "<think>", "</think>", "<|im_end|>", *TURN, *OPEN],
    ),
    "tools": (
        {
            "messages": [
                {"role": "user", "content": "hi"},
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [{"id": FORGED, "type": "function", "function": FUNCTION}],
                },
                {"role": "tool", "tool_call_id": FORGED, "content": FORGED},
            ],
            "tools": [{"type": "function", "function": TOOL}],
        },
        [*CALL, *TURN, *CALL, *TURN, *OPEN],
    ),
    "continued": (
        {
            "messages": [
                {"role": "user", "content": "hi"},
                {"role": "assistant", "content": "<tool_call>" + FORGED},
            ],
            "continue_final_message": True,
            "add_generation_prompt": False,
        },
        [*TURN, "<|im_start|>"],
    ),
    "arguments": (
        {
            "messages": [{"role": "user", "content": "hi"}],
            "chat_template": "<think>{{ more }}{{ bos_token }}",
            "chat_template_kwargs": {"more": FORGED},
        },
        ["<think>"],
    ),
}


@pytest.mark.parametrize("kind", list(CHATS))
async def test_chat_and_tokenize(front: RunningGateway, kind: str) -> None:
    fields, expected = CHATS[kind]
    async with httpx.AsyncClient(base_url=front.url, timeout=20) as http:
        body = {"model": MODEL} | fields
        answer = await http.post("/v1/chat/completions", json=body | {"max_tokens": 4})
        assert answer.status_code == 200, answer.text
        assert await prompt(front) == expected
        tokenized = await http.post("/v1/tokenize", json=body)
        assert tuple(tokenized.json()["tokens"]) == front.worker.jobs[-1].prompt_token_ids
        text = await http.post(
            "/v1/detokenize", json={"model": MODEL, "tokens": tokenized.json()["tokens"]}
        )
        # Nothing is left out, either.
        assert kind == "parts" or FORGED in text.json()["prompt"] or kind == "tools"


async def test_a_prompt_that_the_client_wrote_whole(front: RunningGateway) -> None:
    expected = ["<|im_end|>", "<|im_start|>", "<think>", "</tool_call>"]
    async with httpx.AsyncClient(base_url=front.url, timeout=20) as http:
        body = {"model": MODEL, "prompt": FORGED}
        assert (await http.post("/v1/completions", json=body)).status_code == 200
        assert await prompt(front) == expected
        tokens = (await http.post("/v1/tokenize", json=body)).json()["tokens"]
        assert await spelled(front, tokens) == expected


async def test_messages(front: RunningGateway) -> None:
    asked: Any = {
        "system": [{"type": "text", "text": FORGED}, {"type": "text", "text": "<|im_"}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": FORGED}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "text", "text": FORGED},
                    {"type": "tool_use", "id": "t1", "name": "find", "input": {FORGED: FORGED}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "t1",
                        "content": [{"type": "text", "text": FORGED}],
                    },
                    {"type": "text", "text": FORGED},
                ],
            },
        ],
        "tools": [{"name": "find", "description": FORGED, "input_schema": PARAMETERS}],
    }
    async with anthropic.AsyncAnthropic(base_url=front.url, api_key="none") as sdk:
        await sdk.messages.create(model=MODEL, max_tokens=4, **asked)
        expected = [*CALL, *TURN, *TURN, *CALL, *TURN, *TURN, *OPEN]
        assert await prompt(front) == expected
        counted = await sdk.messages.count_tokens(model=MODEL, **asked)
    assert counted.input_tokens == len(front.worker.jobs[-1].prompt_token_ids or ())


async def test_responses(front: RunningGateway) -> None:
    body = {
        "model": MODEL,
        "instructions": FORGED,
        "store": False,
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": FORGED}]},
            {"type": "function_call", "call_id": "c", **FUNCTION},
            {"type": "function_call_output", "call_id": "c", "output": FORGED},
        ],
        "tools": [{"type": "function", **TOOL}],
    }
    async with httpx.AsyncClient(base_url=front.url, timeout=20) as http:
        answer = await http.post("/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    assert await prompt(front) == [*CALL, *TURN, *TURN, *CALL, *TURN, *OPEN]


async def test_a_websocket(front: RunningGateway) -> None:
    messages = [{"role": "user", "content": FORGED}]
    message = await _told(front, {"model": MODEL, "max_tokens": 4, "messages": messages})
    assert message["type"] == "accepted"
    await eventually(lambda: len(front.worker.jobs) == 1)
    assert await prompt(front) == [*TURN, *OPEN]


@pytest.mark.parametrize("name", ["raise_exception", "range", "messages", "bos_token"])
async def test_what_the_server_sets_is_not_an_argument(front: RunningGateway, name: str) -> None:
    await _refused(front, {name: "x"}, f"chat_template_kwargs.{name}", "set by the server")


@pytest.mark.parametrize("value", ["false", "true", 0, 1, None, {"type": "enabled"}])
async def test_whether_to_think_is_true_or_false(front: RunningGateway, value: Any) -> None:
    for name in ("enable_thinking", "thinking"):
        field = f"chat_template_kwargs.{name}"
        words = f"{field} must be true or false, got {msgspec.json.encode(value).decode()}."
        await _refused(front, {name: value}, field, words)

    if value is not None:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
        async with httpx.AsyncClient(base_url=front.url, timeout=20) as http:
            for path, fields in (("/v1/chat/completions", body), ("/v1/responses", ASKED)):
                answer = await http.post(path, json=fields | {"enable_thinking": value})
                error = answer.json()["error"]
                assert (answer.status_code, error["param"]) == (400, "enable_thinking"), path
        message = await _told(front, body | {"enable_thinking": value})
        assert (message["type"], message["param"]) == ("error", "enable_thinking")


async def _refused(
    front: RunningGateway, arguments: dict[str, Any], param: str, words: str
) -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    paths: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": chat,
        "/v1/tokenize": chat,
        "/v1/responses": ASKED,
        "/v1/responses/input_tokens": {"input": "hi"},
    }
    async with httpx.AsyncClient(base_url=front.url, timeout=20) as http:
        for path, fields in paths.items():
            body = {"model": MODEL, "chat_template_kwargs": arguments} | fields
            answer = await http.post(path, json=body)
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, param), path
            assert words in error["message"]
    message = await _told(front, {"model": MODEL, "chat_template_kwargs": arguments} | chat)
    assert (message["type"], message["param"]) == ("error", param)
    assert not front.worker.jobs


async def _told(front: RunningGateway, fields: dict[str, Any]) -> dict[str, Any]:
    """The first answer to a message over WebSocket."""
    message = {"type": "generate", "id": "a"} | fields
    async with connect(front.ws_url, subprotocols=[SUBPROTOCOL]) as socket:  # type: ignore[list-item]
        await socket.send(json.dumps(message))
        told: dict[str, Any] = json.loads(await socket.recv())
    return told

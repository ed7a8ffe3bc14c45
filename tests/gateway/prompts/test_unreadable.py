"""Pictures in the history: a sentence stands in their place, and a notice names them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import httpx
import openai
import pytest
from websockets.asyncio.client import connect

from millrace.schemas.config import RedisConfig
from tests.support.batches.batch_system import batch_gateway, batch_worker, in_memory
from tests.support.running_gateway import MODEL, RunningGateway, running_gateway
from tests.support.servers import RedisServer

_PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5"
_URL = f"data:image/png;base64,{_PNG}"
_IMAGE = "[An image was here. This model reads text only.]"
_NOTICE = "x-millrace-notice"
_CALL: Any = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"id": "c", "type": "function", "function": {"name": "screenshot", "arguments": "{}"}}
    ],
}
_PICTURE: Any = {"type": "image_url", "image_url": {"url": _URL, "detail": "auto"}}


def _chat(*parts: Any) -> list[Any]:
    result = {"role": "tool", "tool_call_id": "c", "content": list(parts)}
    return [{"role": "user", "content": "Look."}, _CALL, result]


def _left_out(*entries: tuple[str, str]) -> list[dict[str, str]]:
    return [
        {"code": "content_left_out", "param": param, "detail": detail} for param, detail in entries
    ]


def _told(front: RunningGateway) -> str:
    """Return the last prompt of the model."""
    return bytes(front.worker.jobs[-1].prompt_token_ids or ()).decode()


async def test_a_tools_result_in_chat(front: RunningGateway, client: openai.AsyncOpenAI) -> None:
    messages: Any = _chat({"type": "text", "text": "The screen:"}, _PICTURE)
    answer = await client.chat.completions.create(model=MODEL, messages=messages)
    assert f"The screen:\n{_IMAGE}" in _told(front)
    assert _PNG not in _told(front)
    notices = answer.model_dump()[_NOTICE]
    assert notices == _left_out(("messages[2].content[1]", "image_url"))
    stream = await client.chat.completions.create(model=MODEL, messages=messages, stream=True)
    last = [chunk.model_dump() async for chunk in stream][-1]
    assert last[_NOTICE] == notices


@pytest.mark.parametrize(
    ("part", "sentence"),
    [
        ({"type": "input_audio", "input_audio": {"data": "a", "format": "wav"}}, "An audio clip"),
        ({"type": "file", "file": {"file_id": "f"}}, "A file"),
        ({"type": "image", "data": _PNG, "mimeType": "image/png"}, "An image"),
        ({"type": "resource", "resource": {"uri": "file:///a"}}, "Content"),
    ],
)
async def test_other_content_of_a_result(
    front: RunningGateway, http: httpx.AsyncClient, part: Any, sentence: str
) -> None:
    answer = await http.post(
        "/v1/chat/completions", json={"model": MODEL, "messages": _chat(part), "max_tokens": 5}
    )
    assert answer.status_code == 200, answer.text
    assert f"[{sentence} was here. This model reads text only.]" in _told(front)
    detail = part["type"]
    named = f'content_left_out;param="messages[2].content[0]";detail="{detail}"'
    assert answer.headers[_NOTICE] == named


async def test_an_answer_with_a_picture_goes_back(
    front: RunningGateway, http: httpx.AsyncClient
) -> None:
    drawn = {"role": "assistant", "content": [{"type": "text", "text": "Here."}, _PICTURE]}
    messages = [{"role": "user", "content": "a"}, drawn, {"role": "user", "content": "b"}]
    answer = await http.post("/v1/chat/completions", json={"model": MODEL, "messages": messages})
    assert answer.json()[_NOTICE] == _left_out(("messages[1].content[1]", "image_url"))
    assert answer.status_code == 200


@pytest.mark.parametrize("role", ["user", "system"])
async def test_a_users_picture_is_refused(http: httpx.AsyncClient, role: str) -> None:
    message = {"role": role, "content": [_PICTURE]}
    answer = await http.post("/v1/chat/completions", json={"model": MODEL, "messages": [message]})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "messages[0].content[0].type")
    assert "this model takes text only, not 'image_url'" in error["message"]


async def test_text_of_another_type_is_read(front: RunningGateway, http: httpx.AsyncClient) -> None:
    messages = _chat({"type": "output_text", "text": "It rains."})
    answer = await http.post("/v1/chat/completions", json={"model": MODEL, "messages": messages})
    assert _NOTICE not in answer.json()
    assert "It rains." in _told(front)


async def test_a_text_without_text_is_refused(http: httpx.AsyncClient) -> None:
    body = {"model": MODEL, "messages": _chat({"type": "text"})}
    error = (await http.post("/v1/chat/completions", json=body)).json()["error"]
    assert error["param"] == "messages[2].content[0].text"


async def test_tokens_are_counted_of_the_sentence(http: httpx.AsyncClient) -> None:
    messages = _chat(_PICTURE)
    answer = await http.post("/v1/tokenize", json={"model": MODEL, "messages": messages})
    assert answer.json()[_NOTICE] == _left_out(("messages[2].content[0]", "image_url"))
    prompt = bytes(answer.json()["tokens"]).decode()
    assert _IMAGE in prompt


async def test_over_a_socket(front: RunningGateway) -> None:
    async with connect(front.ws_url, subprotocols=["millrace.v1"]) as socket:  # type: ignore[list-item]
        ask = {"type": "generate", "id": "a", "model": MODEL, "messages": _chat(_PICTURE)}
        await socket.send(json.dumps(ask))
        message: dict[str, Any] = {}
        while message.get("type") not in ("done", "error"):
            message = json.loads(await socket.recv())
    assert message[_NOTICE] == _left_out(("messages[2].content[0]", "image_url"))


async def test_outputs_of_calls_in_responses(
    front: RunningGateway, client: openai.AsyncOpenAI
) -> None:
    picture = {"type": "input_image", "image_url": _URL, "detail": "auto"}
    document = {"type": "input_file", "filename": "a.pdf", "file_data": "data:,"}
    function_call = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
    custom_call = {"type": "custom_tool_call", "call_id": "b", "name": "g", "input": "x"}
    given: Any = [
        {"role": "user", "content": "Look."},
        {**function_call},
        {
            "type": "function_call_output",
            "call_id": "a",
            "output": [{"type": "input_text", "text": "It is"}, picture],
        },
        custom_call,
        {"type": "custom_tool_call_output", "call_id": "b", "output": [document]},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "So."}, {"type": "input_audio"}],
        },
        {"role": "user", "content": "And now?"},
    ]
    answer = await client.responses.create(model=MODEL, input=given, store=False)
    assert answer.model_dump()[_NOTICE] == _left_out(
        ("input[2].output[1]", "input_image"),
        ("input[4].output[0]", "input_file"),
        ("input[5].content[1]", "input_audio"),
    )
    count = await client.responses.input_tokens.count(model=MODEL, input=given)
    assert count.input_tokens > 0
    for content in ([picture], [{"type": "input_text", "text": "a"}, picture]):
        messages: Any = [{"role": "user", "content": content}]
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.create(model=MODEL, input=messages)
        place = len(content) - 1
        assert caught.value.param == f"input[0].content[{place}].type"


@pytest.fixture
async def kept(redis_server: RedisServer) -> AsyncIterator[RunningGateway]:
    async with running_gateway(redis=RedisConfig(url=redis_server.url)) as front:
        yield front


async def test_what_is_kept_has_the_sentence(kept: RunningGateway) -> None:
    """Conversations and sessions continue with the sentence."""
    output: Any = {
        "type": "function_call_output",
        "call_id": "a",
        "output": [{"type": "input_image", "image_url": _URL}],
    }
    items: Any = [
        {"role": "user", "content": "Look."},
        {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
        output,
    ]
    async with (
        openai.AsyncOpenAI(base_url=f"{kept.url}/v1", api_key="none", timeout=10) as client,
        httpx.AsyncClient(base_url=kept.url, timeout=10) as http,
    ):
        made = await http.post("/v1/conversations", json={"items": items})
        named = 'content_left_out;param="items[2].output[0]";detail="input_image"'
        assert made.headers[_NOTICE] == named
        conversation = made.json()["id"]
        shown = await client.conversations.items.list(conversation)
        texts = [one.output for one in shown.data if one.type == "function_call_output"]
        assert [str(text).strip() for text in texts] == [_IMAGE]
        again = await client.responses.create(
            model=MODEL, input="And now?", conversation=conversation
        )
        assert again.status == "completed"
        assert _NOTICE not in again.model_dump()
        ask = {"model": MODEL, "session_id": "s", "messages": _chat(_PICTURE)}
        first = await http.post("/v1/chat/completions", json=ask)
        assert first.json()[_NOTICE] == _left_out(("messages[2].content[0]", "image_url"))
        ask["messages"] = [{"role": "user", "content": "And now?"}]
        second = await http.post("/v1/chat/completions", json=ask)
        assert (second.status_code, _NOTICE in second.json()) == (200, False)
        many = [*items[:2], output | {"output": output["output"] * 20}]
        added = await http.post(f"/v1/conversations/{conversation}/items", json={"items": many})
        assert added.headers[_NOTICE].endswith('notices_left_out;detail="5"')
        many.append({"type": "web_search_call", "id": "ws_1"})
        refused = await http.post(f"/v1/conversations/{conversation}/items", json={"items": many})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "items[3]")


async def test_results_in_messages(front: RunningGateway) -> None:
    image = {
        "type": "image",
        "source": {"type": "base64", "media_type": "image/png", "data": _PNG},
    }
    pdf = {
        "type": "document",
        "title": "Manual",
        "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="},
    }
    mixed = {
        "type": "document",
        "source": {"type": "content", "content": [{"type": "text", "text": "Page 1"}, image]},
    }
    parts = [{"type": "text", "text": "The screen:"}, image, pdf, mixed]
    use = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
    messages: Any = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": [use]},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "c", "content": parts}],
        },
    ]
    wanted = _left_out(
        ("messages[2].content[0].content[1]", "image"),
        ("messages[2].content[0].content[2]", "document"),
        ("messages[2].content[0].content[3].source.content[1]", "image"),
    )
    async with anthropic.AsyncAnthropic(base_url=front.url, api_key="none", timeout=10) as sdk:
        ask: Any = {"model": MODEL, "messages": messages}
        answer = await sdk.messages.create(**ask, max_tokens=9)
        assert answer.model_dump()[_NOTICE] == wanted
        text = f"The screen:\n{_IMAGE}\nManual\n[A document was here. This model reads text only.]"
        assert f"{text}\nPage 1\n{_IMAGE}" in _told(front)
        events = [one async for one in await sdk.messages.create(**ask, max_tokens=9, stream=True)]
        assert events[-1].model_dump()[_NOTICE] == wanted
        count = await sdk.messages.count_tokens(**ask)
        assert count.model_dump()[_NOTICE] == wanted
        drawn = [{"role": "assistant", "content": [image]}, {"role": "user", "content": "b"}]
        ask["messages"] = [{"role": "user", "content": "a"}, *drawn]
        answer = await sdk.messages.create(**ask, max_tokens=9)
        assert answer.model_dump()[_NOTICE] == _left_out(("messages[1].content[0]", "image"))
        for block in (image, pdf):
            ask["messages"] = [{"role": "user", "content": [block]}]
            with pytest.raises(anthropic.BadRequestError):
                await sdk.messages.create(**ask, max_tokens=9)


async def test_a_line_of_a_batch(redis_server: RedisServer) -> None:
    line = {
        "custom_id": "a",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"model": MODEL, "messages": _chat(_PICTURE), "max_tokens": 9},
    }
    access = in_memory()
    async with (
        batch_gateway(access, RedisConfig(url=redis_server.url)) as front,
        batch_worker(access),
    ):
        batch = await front.client.batches.create(
            input_file_id=await front.upload(json.dumps(line).encode()),
            endpoint="/v1/chat/completions",
            completion_window="24h",
        )
        batch = await front.end(batch)
        assert batch.output_file_id is not None, batch
        text = (await front.client.files.content(batch.output_file_id)).text
    body = json.loads(text)["response"]["body"]
    assert body[_NOTICE] == _left_out(("messages[2].content[0]", "image_url"))

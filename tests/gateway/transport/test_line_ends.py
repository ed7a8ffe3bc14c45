"""Line separators of Unicode in JSON, for clients that split lines as Python does."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from millrace.gateway.batches.input import InputLine
from millrace.gateway.batches.log import answer_line
from millrace.runtime.json.lines import on_one_line
from millrace.schemas.batches.batches import BatchLine, LineError
from tests.support.running_gateway import MODEL, RunningGateway, running_gateway

_TEXT = "a\u2028b\u2029c\u0085d «é» “é” 日本\x1c\x0b\r\n"


@pytest.fixture
async def front() -> AsyncIterator[RunningGateway]:
    async with running_gateway() as running:
        yield running


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": _TEXT}]}),
        ("/v1/completions", {"prompt": _TEXT, "max_tokens": 99, "logprobs": 2}),
        ("/v1/completions", {"prompt": _TEXT, "max_tokens": 99, "echo": True}),
        ("/v1/responses", {"input": _TEXT, "instructions": _TEXT, "metadata": {"a": _TEXT}}),
        ("/v1/messages", {"max_tokens": 99, "messages": [{"role": "user", "content": _TEXT}]}),
    ],
)
@pytest.mark.parametrize("headers", [{}, {"accept": "text/event-stream"}])
async def test_an_event_is_one_line_of_data(
    front: RunningGateway, path: str, body: dict[str, Any], headers: dict[str, str]
) -> None:
    async with (
        httpx.AsyncClient(base_url=front.url, timeout=20.0) as http,
        http.stream(
            "POST", path, json={"model": MODEL, **body, "stream": True}, headers=headers
        ) as answer,
    ):
        assert answer.status_code == 200
        received = (await answer.aread()).decode()
    events = []
    for line in received.splitlines():
        assert not line or line.startswith(("data: ", "event: ", "id: "))
        if line.startswith("data: {"):
            events.append(json.loads(line.removeprefix("data: ")))
    num_times = 2 if body.get("echo") else 1
    assert "".join(map(text_of, events)) == _TEXT * num_times


def text_of(event: dict[str, Any]) -> str:
    """The text that an event of any of the endpoints adds."""
    if "choices" in event:
        return "".join(
            one["text"] if "text" in one else one["delta"].get("content") or ""
            for one in event["choices"]
        )
    if event["type"] == "response.output_text.delta":
        return str(event["delta"])
    if event["type"] == "content_block_delta":
        return str(event["delta"]["text"])
    return ""


def test_a_line_of_a_batch_is_one_line() -> None:
    request = BatchLine(custom_id=_TEXT, method="POST", url="/v1/completions", body={})  # type: ignore[arg-type]
    why = LineError(code="code", message=_TEXT)
    line = answer_line("batch_1", InputLine(1, b""), request, why).decode()
    assert len(line.splitlines()) == 1
    assert json.loads(line)["custom_id"] == _TEXT


@pytest.mark.parametrize("mark", ["\u2028", "\u2029", "\u0085"])
def test_each_mark_is_escaped_wherever_it_is(mark: str) -> None:
    value = {f"{mark}a{mark}": [mark, f"é{mark}€{mark}{mark}"]}
    encoded = json.dumps(value, ensure_ascii=False).encode()
    line = on_one_line(encoded)
    assert json.loads(line) == value
    assert len(line.decode().splitlines()) == 1
    assert line.decode() == encoded.decode().replace(mark, f"\\u{ord(mark):04x}")

"""Clients that continue their answers at another gateway, as the documents describe."""

from __future__ import annotations

import asyncio
import json
import uuid
from abc import ABC, abstractmethod
from typing import Any

import httpx
import openai
import websockets
from websockets.exceptions import ConnectionClosed, InvalidHandshake

from millrace.gateway.api.event_ids import parse_event_id
from tests.e2e.clients import Answer, chat_body
from tests.support.system import System

_PAUSE_S = 0.05
_AWAY = (OSError, ConnectionClosed, InvalidHandshake, httpx.TransportError)


class Persistent(ABC):
    """Asks one question, over as many connections as it takes.

    ``num_tokens`` is how many have come so far. ``unannounced`` counts connections that ended in
    the middle without a word of the gateway's.
    """

    def __init__(self, system: System, question: str, **options: Any) -> None:
        self.system = system
        self.key = uuid.uuid4().hex
        self.request_id = ""
        self.num_tokens = 0
        self.num_connections = 0
        self.unannounced = 0
        self._body = chat_body(question, **options)

    async def ask(self) -> Answer:
        while True:
            try:
                answer = await self._connect()
            except _AWAY:
                answer = None
            if answer is not None:
                return answer
            await asyncio.sleep(_PAUSE_S)  # as a client does before it tries again

    @abstractmethod
    async def _connect(self) -> Answer | None:
        """The end of the answer, or None if this connection did not get to see it."""


class SocketClient(Persistent):
    """Resumes by the index of the first token that it has not got. ``steps`` says by call whether
    the gateway's own tools did well; one just before the break may be sent again."""

    def __init__(self, system: System, question: str, **options: Any) -> None:
        super().__init__(system, question, **options)
        self.text = ""
        self.steps: dict[str, bool] = {}

    async def _connect(self) -> Answer | None:
        subprotocols = [websockets.Subprotocol("millrace.v1")]
        async with websockets.connect(self.system.websocket, subprotocols=subprotocols) as socket:
            self.num_connections += 1
            await socket.send(json.dumps({"id": "1", **self._opening()}))
            is_leaving = False
            try:
                async for raw in socket:
                    message = json.loads(raw)
                    is_leaving = is_leaving or message["type"] == "going_away"
                    if (answer := self._read(message)) is not None:
                        return answer
            finally:
                announced = is_leaving and socket.close_code == 1012
                self.unannounced += bool(socket.close_code) and not announced
        return None

    def _opening(self) -> dict[str, Any]:
        if self.request_id:
            return {
                "type": "resume",
                "request_id": self.request_id,
                "next_index": self.num_tokens,
            }
        return {"type": "generate", "idempotency_key": self.key, **self._body}

    def _read(self, message: dict[str, Any]) -> Answer | None:
        match message["type"]:
            case "accepted":
                self.request_id = message["request_id"]
            case "delta":
                assert message["index"] == self.num_tokens, "a token is missing or repeated"
                self.num_tokens += message["num_tokens"]
                self.text += message["text"]
            case "tool_step":
                self.steps[message["call_id"]] = message["ok"]
            case "done":
                usage = message["usage"]
                assert usage["completion_tokens"] == self.num_tokens
                return Answer(
                    self.request_id,
                    self.text,
                    message["finish_reason"],
                    usage["prompt_tokens"],
                    usage["completion_tokens"],
                )
            case "error" if not message.get("retry_after_s"):
                raise AssertionError(message)
        return None


class EventClient(Persistent):
    """Resumes by the id of the last event that it has seen."""

    def __init__(self, system: System, question: str, **options: Any) -> None:
        super().__init__(system, question, **options)
        self._body |= {"stream": True, "stream_options": {"include_usage": True}}
        self._pieces: list[str] = []
        self._fresh: list[str] = []
        self._last_id = ""
        self._finish_reason = ""
        self._usage: dict[str, int] = {}

    async def _connect(self) -> Answer | None:
        self._fresh = []
        is_over = False
        async with (
            # Reading certificates, of which there are none here, takes longer than all the rest.
            httpx.AsyncClient(base_url=self.system.http, timeout=60.0, verify=False) as http,
            http.stream(
                "POST", "/v1/chat/completions", json=self._body, headers=self._headers()
            ) as response,
        ):
            if response.status_code == 503:
                return None
            assert response.status_code == 200, (await response.aread()).decode()
            self.num_connections += 1
            self.request_id = response.headers["x-request-id"]
            event_id = ""
            try:
                async for line in response.aiter_lines():
                    name, _, value = line.partition(": ")
                    if name == "id":
                        event_id = value
                    elif value == "[DONE]":
                        is_over = True
                        return self._answer()
                    elif name == "data":
                        if not self._read(json.loads(value)):
                            is_over = True
                            return None
                    elif not line and event_id:
                        self._note(event_id)
                        event_id = ""
            finally:
                self.unannounced += not is_over
        return None

    def _headers(self) -> dict[str, str]:
        headers = {"Idempotency-Key": self.key}
        if self._last_id:
            headers["Last-Event-ID"] = self._last_id
        return headers

    def _read(self, chunk: dict[str, Any]) -> bool:
        """Read a chunk, and return False if the gateway announces its restart."""
        if "error" in chunk:
            assert chunk["error"]["code"] == "gateway_restarting", chunk
            return False
        self._usage = chunk.get("usage") or self._usage
        for choice in chunk["choices"]:
            self._fresh.append(choice["delta"].get("content") or "")
            self._finish_reason = choice["finish_reason"] or self._finish_reason
        return True

    def _note(self, event_id: str) -> None:
        self._last_id = event_id
        (self.num_tokens,) = parse_event_id(event_id).indices
        self._pieces += self._fresh
        self._fresh = []

    def _answer(self) -> Answer:
        usage = self._usage
        return Answer(
            self.request_id,
            "".join(self._pieces + self._fresh),
            self._finish_reason,
            usage["prompt_tokens"],
            usage["completion_tokens"],
        )


class WholeClient(Persistent):
    """OpenAI's own client, which tries again by itself, with a key that makes that harmless."""

    async def _connect(self) -> Answer:
        async with openai.AsyncOpenAI(
            base_url=f"{self.system.http}/v1", api_key="none", max_retries=8
        ) as client:
            raw = await client.chat.completions.with_raw_response.create(
                **self._standard(),
                extra_headers={"Idempotency-Key": self.key},
            )
        self.num_connections += 1 + raw.retries_taken
        completion = raw.parse()
        choice, usage = completion.choices[0], completion.usage
        assert usage is not None
        return Answer(
            raw.headers["x-request-id"],
            choice.message.content or "",
            choice.finish_reason,
            usage.prompt_tokens,
            usage.completion_tokens,
        )

    def _standard(self) -> dict[str, Any]:
        body = dict(self._body)
        extra = {name: body.pop(name) for name in ("ignore_eos",) if name in body}
        return body | {"extra_body": extra}

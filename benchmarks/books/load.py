"""Load whose figures are compared: every way to ask for several generations, and kills."""

from __future__ import annotations

import asyncio
import itertools
import json
import uuid
from collections.abc import Awaitable, Callable
from decimal import Decimal
from typing import Any

import httpx
import msgspec
from websockets.asyncio.client import connect
from websockets.exceptions import WebSocketException

from tests.support.system import System
from tests.support.waiting import eventually

_MESSAGES = [{"role": "user", "content": "What is TTFT?"}]
_TIMEOUT_S = 60.0
_AGAIN_S = 0.5
_RETRIED = frozenset({429, 500, 502, 503, 504})


class Tenant(msgspec.Struct, frozen=True):
    """A tenant, which asks one model, and so pays in one currency."""

    name: str
    key: str
    model: str

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.key}"}


class ClientAnswers(msgspec.Struct):
    """Answers of a client, by request id.

    ``usage`` holds prompt, cached and completion tokens of answered requests. Other requests were
    accepted, then left or cancelled. ``num_lost`` requests broke off before the client had their
    ids: they may have been accepted.
    """

    usage: dict[str, tuple[int, int, int]] = {}
    accepted: set[str] = set()
    num_lost: int = 0

    def answered(self, request_id: str, usage: dict[str, Any]) -> None:
        """Record an answer. A repeated request with the same key has the same answer."""
        details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
        prompt = usage.get("prompt_tokens", usage.get("input_tokens", 0))
        cached = details.get("cached_tokens", 0)
        if "cache_read_input_tokens" in usage:  # Anthropic counts them separately
            cached = usage["cache_read_input_tokens"]
            prompt += cached
        completion = usage.get("completion_tokens", usage.get("output_tokens", 0))
        known = self.usage.setdefault(request_id, (prompt, cached, completion))
        if known != (prompt, cached, completion):
            raise ValueError(f"{request_id} was answered with {known} and {usage}")
        self.accepted.add(request_id)


class BooksClient:
    """Client of one tenant that repeats a request under its Idempotency-Key until answered."""

    def __init__(self, system: System, tenant: Tenant, answers: ClientAnswers) -> None:
        self._system = system
        self._answers = answers
        self._tenant = tenant
        self._http = httpx.AsyncClient(timeout=_TIMEOUT_S, headers=tenant.headers)

    async def close(self) -> None:
        await self._http.aclose()

    async def ask_all(self, rounds: int, may_end: asyncio.Event) -> None:
        """Ask in each way ``rounds`` times, a few at a time, and go on until ``may_end`` is set."""
        ways: tuple[Callable[[], Awaitable[None]], ...] = (
            self.chat,
            self.several_choices,
            self.several_prompts,
            self.tools,
            self.several_choices_with_tools,
            self.responses,
            self.messages,
            self.embeddings,
            self.socket,
            self.replay,
            self.leave,
        )
        num_rounds = 0
        while num_rounds < rounds or not may_end.is_set():
            await asyncio.gather(self.batch(), *(way() for way in ways))
            num_rounds += 1

    async def chat(self) -> None:
        await self._ask("chat/completions", messages=_MESSAGES, max_tokens=8)

    async def several_choices(self) -> None:
        await self._ask("chat/completions", messages=_MESSAGES, max_tokens=24, n=3)

    async def several_prompts(self) -> None:
        prompts = ["What is TTFT?", "What is a lease?"]
        await self._ask("completions", prompt=prompts, max_tokens=8, n=2)

    async def tools(self, **more: Any) -> None:
        asked: dict[str, Any] = {"server_tools": ["weather"], "tool_choice": "required"}
        await self._ask(
            "chat/completions", messages=_MESSAGES, max_tokens=64, temperature=0, **asked, **more
        )

    async def several_choices_with_tools(self) -> None:
        await self.tools(n=2)

    async def responses(self) -> None:
        await self._ask("responses", input="What is TTFT?", max_output_tokens=16)

    async def messages(self) -> None:
        await self._ask("messages", messages=_MESSAGES, max_tokens=8)

    async def embeddings(self) -> None:
        """Ask for embeddings, which keep no answer for a key: a request that breaks off is lost."""
        body = {"model": self._tenant.model, "input": ["a lease", "a worker", "a queue"]}
        answer = await self._send("/v1/embeddings", json=body)
        if answer is not None:
            self._answers.answered(answer.headers["x-request-id"], answer.json()["usage"])

    async def replay(self) -> None:
        """Ask three times for the same answer, twice at once: one request."""
        key = uuid.uuid4().hex
        ask: dict[str, Any] = {"messages": _MESSAGES, "max_tokens": 8, "n": 2, "key": key}
        await asyncio.gather(*(self._ask("chat/completions", **ask) for _ in range(2)))
        await self._ask("chat/completions", **ask)

    async def leave(self) -> None:
        """Leave while choices are streamed."""
        body = {"model": self._tenant.model, "messages": _MESSAGES, "max_tokens": 200, "n": 2}
        url = f"{self._system.http}/v1/chat/completions"
        try:
            async with self._http.stream("POST", url, json=body | {"stream": True}) as answer:
                async for line in answer.aiter_lines():
                    if line.startswith('data: {"id"'):
                        self._answers.accepted.add(json.loads(line.removeprefix("data: "))["id"])
                        return
        except httpx.TransportError:
            pass
        self._answers.num_lost += 1

    async def socket(self) -> None:
        asked = {"type": "generate", "id": "a", "messages": _MESSAGES, "max_tokens": 8, "n": 2}
        headers = self._tenant.headers
        message: dict[str, Any] = {"type": ""}
        request_id = ""
        try:
            async with connect(self._system.websocket, additional_headers=headers) as socket:
                await socket.send(json.dumps(asked | {"model": self._tenant.model}))
                while message["type"] not in ("done", "error"):
                    message = json.loads(await socket.recv())
                    request_id = message.get("request_id") or request_id
        except (OSError, WebSocketException):
            pass
        if message["type"] == "done":
            self._answers.answered(request_id, message["usage"])
        elif request_id:
            self._answers.accepted.add(request_id)
        else:
            self._answers.num_lost += 1

    async def batch(self) -> None:
        """Send batches: lines of several choices, and of several inputs."""
        body = {"model": self._tenant.model, "messages": _MESSAGES, "max_tokens": 8}
        bodies = [body | {"n": number} for number in (1, 2, 3)]
        await self._run_batch("/v1/chat/completions", bodies)
        inputs = {"model": self._tenant.model, "input": ["a lease", "a worker"]}
        await self._run_batch("/v1/embeddings", [inputs])

    async def _run_batch(self, url: str, bodies: list[dict[str, Any]]) -> None:
        lines = [
            json.dumps({"custom_id": str(number), "method": "POST", "url": url, "body": body})
            for number, body in enumerate(bodies)
        ]
        base = f"{self._system.http}/v1"
        file = ("in.jsonl", "\n".join(lines).encode())
        data = {"purpose": "batch"}
        sent = await self._send("/v1/files", files={"file": file}, data=data)
        if sent is None:
            return
        asked = {"input_file_id": sent.json()["id"], "endpoint": url, "completion_window": "24h"}
        made = await self._send("/v1/batches", json=asked, num_requests=len(bodies))
        if made is None:
            return
        batch = made.json()

        async def is_over() -> bool:
            try:
                answer = await self._http.get(f"{base}/batches/{batch['id']}")
            except httpx.TransportError:
                return False
            batch.update(answer.json() if answer.status_code == 200 else {})
            return bool(batch["status"] == "completed")

        await eventually(is_over, _TIMEOUT_S, "the batch's end")
        answers = await self._http.get(f"{base}/files/{batch['output_file_id']}/content")
        for line in answers.text.splitlines():
            response = json.loads(line)["response"]
            self._answers.answered(response["request_id"], response["body"]["usage"])

    async def _send(
        self, path: str, *, num_requests: int = 1, **sent: Any
    ) -> httpx.Response | None:
        """Post a request without an idempotent answer; return None if it broke off or failed."""
        while True:
            try:
                answer = await self._http.post(f"{self._system.http}{path}", **sent)
            except httpx.TransportError:
                answer = None
            if answer is None or answer.status_code >= httpx.codes.INTERNAL_SERVER_ERROR:
                self._answers.num_lost += num_requests
                return None
            if answer.status_code == httpx.codes.OK:
                return answer
            if answer.status_code != httpx.codes.TOO_MANY_REQUESTS:
                raise ValueError(f"{path} answered {answer.status_code}: {answer.text[:300]}")
            await asyncio.sleep(_AGAIN_S)

    async def _ask(self, path: str, *, key: str = "", **body: Any) -> None:
        """Ask until there is an answer, which is always that of the one accepted request."""
        headers = {"idempotency-key": key or uuid.uuid4().hex}
        url, body = f"{self._system.http}/v1/{path}", {"model": self._tenant.model, **body}
        for _ in itertools.count():
            try:
                answer = await self._http.post(url, json=body, headers=headers)
            except httpx.TransportError:
                await asyncio.sleep(_AGAIN_S)
                continue
            if answer.status_code not in _RETRIED:
                break
            if answer.status_code >= httpx.codes.INTERNAL_SERVER_ERROR:
                # A failure is final for its key.
                headers = {"idempotency-key": uuid.uuid4().hex}
                self._answers.num_lost += 1
            await asyncio.sleep(_AGAIN_S)
        if answer.status_code != 200:
            raise ValueError(f"{url} answered {answer.status_code}: {answer.text[:300]}")
        found = answer.json()
        self._answers.answered(found["id"], found["usage"])

    async def spent(self, currency: str) -> Decimal:
        """Return the amount on the counter of the tenant's budget."""
        answer = await self._http.get(f"{self._system.http}/v1/limits")
        accounts = answer.json()["accounts"]
        (tenant,) = (one for one in accounts if one["kind"] == "tenant")
        return Decimal(tenant["spent"].get(currency, 0))

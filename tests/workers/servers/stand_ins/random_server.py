"""Real HTTP server that draws tokens at random, and misbehaves on request; and its dialect."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from millrace.engine.types import EngineRequest
from millrace.schemas.engines import EngineKind
from millrace.schemas.frames import FinishReason
from millrace.workers.servers.client import ServerClient
from millrace.workers.servers.dialect import (
    AnswerPart,
    AnswerReader,
    Call,
    Command,
    Dialect,
    ServerAddress,
    ServerFacts,
    ServerLoad,
    ServerStreamError,
)
from tests.workers.servers.stand_ins.listening import break_off, event_stream, listening


@dataclass
class RandomServer:
    """Server of random tokens. ``breaks`` are the numbers of the calls whose connection breaks
    after a token, ``status`` is the status of every answer, ``calls`` are the bodies of all calls
    so far. Tokens follow from seed and place; at temperature 0 they follow from the last token."""

    vocab_size: int
    breaks: set[int] = field(default_factory=set)
    status: int = 200
    healthy: bool = True
    tells_load: bool = True
    token_s: float = 0.0
    calls: list[dict[str, Any]] = field(default_factory=list)
    num_running: int = 0

    async def health(self, _request: web.Request) -> web.Response:
        return web.Response(status=200 if self.healthy else 503)

    async def load(self, _request: web.Request) -> web.Response:
        return web.Response(status=200 if self.tells_load else 503)

    async def facts(self, _request: web.Request) -> web.Response:
        return web.json_response({"version": "1.2", "vocab_size": self.vocab_size})

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.calls.append(body)
        number = len(self.calls)
        if self.status != 200:
            return web.Response(status=self.status, text="no")
        async with event_stream(self, request) as response:
            await self._stream(response, body, number)
        return response

    async def _stream(
        self, response: web.StreamResponse, body: dict[str, Any], number: int
    ) -> None:
        known: list[int] = body["prompt"]
        for _ in range(body["max_tokens"]):
            token = self._draw(body, known)
            known.append(token)
            await response.write(b"data: " + msgspec.json.encode({"tokens": [token]}) + b"\r\n\r\n")
            if number in self.breaks:
                break_off(response)
                return
            await asyncio.sleep(self.token_s)
        await response.write(b'data: {"end": "length"}\n\n')

    def _draw(self, body: dict[str, Any], known: Sequence[int]) -> int:
        choices: Sequence[int] = body.get("allowed") or range(3, self.vocab_size)
        if body["temperature"] == 0:
            source = random.Random(known[-1])
        else:
            source = random.Random(f"{body['seed']}:{len(known)}")
        return source.choice(choices)


@asynccontextmanager
async def serving(server: RandomServer) -> AsyncIterator[str]:
    """Serve ``server`` over HTTP, and yield its URL."""
    handlers = {
        "/health": server.health,
        "/load": server.load,
        "/facts": server.facts,
        "/generate": server.generate,
    }

    async def handle(request: web.Request) -> web.StreamResponse:
        return await handlers[request.path](request)

    async with listening(handle) as url:
        yield url


class RandomDialect(Dialect):
    """Dialect of a ``RandomServer``, whose kind is arbitrary."""

    kind = EngineKind.VLLM
    package = "random-server"
    program = "random-server"
    oldest_version = (1, 1)

    def command(self, program: Path, address: ServerAddress) -> Command:
        return Command((str(program), str(address.socket)), {})

    async def read_facts(self, client: ServerClient) -> ServerFacts:
        said = await client.get_json("/facts")
        return ServerFacts(
            version=said["version"], vocab_size=said["vocab_size"], max_num_sequences=8
        )

    async def read_load(self, client: ServerClient) -> ServerLoad:
        await client.get("/load")
        return ServerLoad(kv_usage=0.5)

    def call(self, request: EngineRequest, token_ids: Sequence[int]) -> Call:
        return Call("/generate", _body(request, token_ids))

    def call_one_of(
        self, request: EngineRequest, token_ids: Sequence[int], allowed: Sequence[int]
    ) -> Call:
        return Call("/generate", _body(request, token_ids) | {"max_tokens": 1, "allowed": allowed})

    def biased(self, call: Call, bias: dict[int, float]) -> Call:
        assert not bias, "what is drawn at random has no logits"
        return call

    def reader(self, request: EngineRequest, token_ids: Sequence[int]) -> AnswerReader:
        return _RandomReader()


def _body(request: EngineRequest, token_ids: Sequence[int]) -> dict[str, Any]:
    sampling = request.sampling
    return {
        "prompt": [*request.prompt_token_ids, *token_ids],
        "max_tokens": (sampling.max_tokens or 64) - len(token_ids),
        "temperature": sampling.temperature,
        "seed": sampling.seed,
    }


class _RandomReader(AnswerReader):
    def read(self, event: bytes) -> AnswerPart | None:
        try:
            said = msgspec.json.decode(event)
        except msgspec.DecodeError as error:
            raise ServerStreamError("no JSON") from error
        if "end" in said:
            return AnswerPart(finish_reason=FinishReason.LENGTH)
        return AnswerPart(token_ids=tuple(said["tokens"]))

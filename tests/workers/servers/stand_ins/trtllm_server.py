"""A real HTTP server that answers as TensorRT-LLM's documentation says that `trtllm-serve` does.

It runs on GPUs only, so this stands in for it: what it is asked, and what it answers, is written
after `docs/source/commands/trtllm-serve` and the schema of its completions of version 1.2, which
takes no field that it does not know.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from millrace.registry.tokenizers.tokenizer import Tokenizer
from tests.workers.servers.stand_ins.listening import break_off, event_stream, listening

_KNOWN = frozenset(
    {
        *("model", "prompt", "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed"),
        *("stop_token_ids", "include_stop_str_in_output", "ignore_eos", "detokenize"),
        *("stream", "stream_options", "logit_bias"),
    }
)


@dataclass
class TrtllmServer:
    """Draws at random: at temperature 0 a token follows from the last one, otherwise from seed and
    place. ``calls`` are the streams that it was asked for."""

    tokenizer: Tokenizer
    version: Any = "1.2.0"
    token_s: float = 0.0
    breaks_at: dict[int, int] = field(default_factory=dict)
    end_at: int | None = None
    steps: list[Any] = field(default_factory=list)
    num_running: int = 0
    calls: list[dict[str, Any]] = field(default_factory=list)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        match request.path:
            case "/health":
                return web.Response()
            case "/version":
                return web.json_response({"version": self.version})
            case "/v1/models":
                model = {"id": "demo", "object": "model", "owned_by": "tensorrt_llm"}
                return web.json_response({"object": "list", "data": [model]})
            case "/metrics":
                # What was told is gone.
                told, self.steps = self.steps, []
                return web.json_response(told)
            case "/v1/completions":
                return await self._complete(request)
        return web.json_response({"detail": "Not Found"}, status=404)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        unknown = sorted(body.keys() - _KNOWN)
        bias = [abs(value) for value in body.get("logit_bias", {}).values()]
        if unknown or max(bias, default=0.0) > 100.0:
            error = {"object": "error", "message": f"no: {unknown} {bias}", "code": 400}
            return web.json_response(error, status=400)
        if not body.get("stream"):
            num_tokens = len(self.tokenizer.encode(body["prompt"]))
            choice = {"index": 0, "text": "x", "token_ids": None, "finish_reason": "length"}
            usage = {"prompt_tokens": num_tokens, "completion_tokens": 1}
            return web.json_response({"choices": [choice], "usage": usage})
        self.calls.append(body)
        async with event_stream(self, request) as response:
            await self._stream(response, body, len(self.calls))
        return response

    async def _stream(
        self, response: web.StreamResponse, body: dict[str, Any], number: int
    ) -> None:
        prompt, made, reason = body["prompt"], list[int](), None
        while reason is None:
            if len(made) == self.breaks_at.get(number):
                break_off(response)
                return
            made.append(self._draw(body, [*prompt, *made], len(made)))
            reason = "length" if len(made) == body["max_tokens"] else None
            reason = "stop" if made[-1] in body["stop_token_ids"] else reason
            choice = {
                "index": 0,
                "text": "",
                "token_ids": made[-1:],
                "logprobs": None,
                "finish_reason": reason,
                "stop_reason": made[-1] if reason == "stop" else None,
            }
            await response.write(_data({"id": "cmpl-1", "choices": [choice], "usage": None}))
            await asyncio.sleep(self.token_s)
        usage = {
            "prompt_tokens": len(prompt),
            "completion_tokens": len(made),
            "prompt_tokens_details": {"cached_tokens": 16},
        }
        await response.write(_data({"id": "cmpl-1", "choices": [], "usage": usage}))
        await response.write(b"data: [DONE]\n\n")

    def _draw(self, body: dict[str, Any], known: list[int], num_made: int) -> int:
        if num_made == self.end_at:
            return self.tokenizer.eos_token_ids[0]
        greedy = body["temperature"] == 0
        source = random.Random(known[-1] if greedy else f"{body['seed']}:{len(known)}")
        return source.choice(range(5, self.tokenizer.vocab_size))


def _data(event: Any) -> bytes:
    return b"data: " + msgspec.json.encode(event) + b"\n\n"


async def _run(arguments: Sequence[str]) -> None:
    assert arguments[1] == "serve"
    options = dict(pairwise(arguments))
    server = TrtllmServer(Tokenizer.load(Path(arguments[2])))
    async with listening(server.handle, int(options["--port"])):
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_run(sys.argv))

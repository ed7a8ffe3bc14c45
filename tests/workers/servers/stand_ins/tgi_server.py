"""A real HTTP server that answers as Text Generation Inference's documentation says that it does.

TGI has no package, so this stands in for it: what it is asked, and what it answers, is written
after its OpenAPI document and `docs/source/reference` of version 3.3.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from os import environ
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from millrace.registry.tokenizers.tokenizer import Tokenizer
from tests.workers.servers.stand_ins.listening import break_off, listening


@dataclass
class TgiServer:
    """Draws at random: at temperature 0 a token follows from the text so far, otherwise from that
    and the seed. ``calls`` are what ``/generate_stream`` was asked, and ``errors`` what it answers
    instead, by the number of the call."""

    tokenizer: Tokenizer
    version: str = "3.3.7"
    window: int = 128
    max_concurrent_requests: int = 4
    api_key: str = ""
    token_s: float = 0.0
    end_at: int | None = None
    breaks_at: dict[int, int] = field(default_factory=dict)
    errors: dict[int, dict[str, str]] = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)
    num_running: int = 0
    calls: list[dict[str, Any]] = field(default_factory=list)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        is_open = request.path in ("/health", "/info", "/metrics")
        wanted = f"Bearer {self.api_key}" if self.api_key else ""
        if not is_open and request.headers.get("Authorization", "") != wanted:
            return web.Response(status=401)
        match request.path:
            case "/health":
                return web.Response()
            case "/metrics":
                lines = (
                    "# TYPE tgi_batch_inference_count counter",
                    'tgi_batch_inference_count{method="prefill"} 3',
                    'tgi_batch_inference_count{method="decode"} 40',
                    "tgi_queue_size 0",
                )
                return web.Response(text="\n".join(lines))
            case "/info":
                return web.json_response(
                    {
                        "model_id": "demo",
                        "model_sha": None,
                        "model_pipeline_tag": None,
                        "max_concurrent_requests": self.max_concurrent_requests,
                        "max_best_of": 2,
                        "max_stop_sequences": 4,
                        "max_input_tokens": self.window - 1,
                        "max_total_tokens": self.window,
                        "validation_workers": 2,
                        "max_client_batch_size": 4,
                        "router": "text-generation-router",
                        "version": self.version,
                        "sha": None,
                        "docker_label": None,
                        **self.info,
                    }
                )
            case "/tokenize":
                ids = self.tokenizer.encode((await request.json())["inputs"])
                tokens = [{"id": one, "text": "", "start": 0, "stop": 0} for one in ids]
                return web.json_response(tokens)
            case "/generate_stream":
                return await self._generate(request)
        return web.Response(status=404)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.calls.append(body)
        number = len(self.calls)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        error = self.errors.get(number)
        if self.num_running >= self.max_concurrent_requests:
            error = {"error": "Model is overloaded", "error_type": "overloaded"}
        if error is not None:
            await response.write(_data(error))
            return response
        self.num_running += 1
        try:
            await self._stream(response, body, number)
        finally:
            self.num_running -= 1
        return response

    async def _stream(
        self, response: web.StreamResponse, body: dict[str, Any], number: int
    ) -> None:
        parameters = body["parameters"]
        prompt, made = self.tokenizer.encode(body["inputs"]), list[int]()
        details = None
        while details is None:
            if len(made) == self.breaks_at.get(number):
                break_off(response)
                return
            made.append(self._draw(parameters, prompt, made))
            reason = "length" if len(made) == parameters["max_new_tokens"] else None
            reason = "eos_token" if made[-1] in self.tokenizer.eos_token_ids else reason
            if reason is not None:
                details = {
                    "finish_reason": reason,
                    "generated_tokens": len(made),
                    "seed": parameters.get("seed"),
                    "input_length": len(prompt),
                }
            token = {"id": made[-1], "text": "", "logprob": -0.5, "special": False}
            text = None if details is None else self.tokenizer.decode(made)
            event = {"index": len(made), "token": token, "generated_text": text, "details": details}
            await response.write(_data(event))
            if details is None:
                await asyncio.sleep(self.token_s)

    def _draw(self, parameters: dict[str, Any], prompt: list[int], made: list[int]) -> int:
        if len(made) == self.end_at:
            return self.tokenizer.eos_token_ids[0]
        text = self.tokenizer.decode([*prompt, *made], skip_special_tokens=False)
        seed = parameters["seed"] if parameters["do_sample"] else ""
        ids = range(len(self.tokenizer.special_token_ids), self.tokenizer.vocab_size)
        return random.Random(f"{seed}:{text}").choice(ids)


def _data(event: Any) -> bytes:
    return b"data:" + msgspec.json.encode(event) + b"\n\n"


async def _run(arguments: Sequence[str]) -> None:
    options = dict(pairwise(arguments))
    tokenizer = Tokenizer.load(Path(options["--model-id"]))
    server = TgiServer(tokenizer, api_key=environ["API_KEY"])
    async with listening(server.handle, int(options["--port"])):
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_run(sys.argv))

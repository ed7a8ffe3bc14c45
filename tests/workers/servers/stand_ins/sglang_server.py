"""A real HTTP server that answers as SGLang's documentation says that SGLang does.

There is no SGLang for processors, so this stands in for it: what it is asked, and what it answers,
is written after `docs/basic_usage/native_api` and `sampling_params` of its documentation.
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
import yaml
from aiohttp import web

from millrace.registry.tokenizers.tokenizer import Tokenizer
from tests.workers.servers.stand_ins.listening import event_stream, listening


@dataclass
class SglangServer:
    """Draws at random: at temperature 0 a token follows from the last one, otherwise from seed and
    place. ``disjoint``: each event has the new tokens only. ``calls`` are what ``/generate`` was
    asked, ``aborted`` the ids of calls that were aborted, ``num_cached`` how many
    tokens of each prompt it finds, until its cache is emptied."""

    tokenizer: Tokenizer
    vocab_size: int
    version: str = "0.5.9"
    window: int = 128
    disjoint: bool = True
    api_key: str = ""
    token_s: float = 0.0
    info: dict[str, Any] = field(default_factory=dict)
    num_running: int = 0
    calls: list[dict[str, Any]] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    num_cached: int = 16

    async def handle(self, request: web.Request) -> web.StreamResponse:
        is_open = request.path in ("/health", "/metrics")
        if not is_open and request.headers.get("Authorization", "") != self._authorization:
            return web.json_response({"error": "Unauthorized"}, status=401)
        match request.path:
            case "/health":
                return web.Response()
            case "/metrics":
                usage = 'sglang:token_usage{model_name="demo",tp_rank="0"} 0.25\n'
                return web.Response(text=f"# TYPE sglang:token_usage gauge\n{usage}")
            case "/server_info":
                return web.json_response(
                    {
                        "version": self.version,
                        "enable_metrics": True,
                        "enable_priority_scheduling": True,
                        "grammar_backend": "llguidance",
                        "max_running_requests": None,
                        "max_total_num_tokens": 4096,
                        "internal_states": [{"max_running_requests": 4}],
                        **self.info,
                    }
                )
            case "/v1/models":
                model = {"id": "demo", "object": "model", "max_model_len": self.window}
                return web.json_response({"object": "list", "data": [model]})
            case "/abort_request":
                self.aborted.append((await request.json())["rid"])
                return web.Response()
            case "/flush_cache":
                self.num_cached = 0
                return web.Response()
            case "/generate":
                return await self._generate(request)
        return web.json_response({"detail": "Not Found"}, status=404)

    @property
    def _authorization(self) -> str:
        return f"Bearer {self.api_key}" if self.api_key else ""

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.calls.append(body)
        if "text" in body:
            prompt = list(self.tokenizer.encode(body["text"], add_special_tokens=False))
        else:
            prompt = body["input_ids"]
        if body["sampling_params"].get("repetition_penalty", 1.0) > 2.0:
            message = "repetition_penalty must be in (0, 2]"
            return web.json_response({"error": {"message": message}}, status=400)
        if not body.get("stream"):
            return web.json_response(self._event(body, prompt, [40], 1, {"type": "length"}))
        async with event_stream(self, request) as response:
            await self._stream(response, body, prompt)
        return response

    async def _stream(
        self, response: web.StreamResponse, body: dict[str, Any], prompt: list[int]
    ) -> None:
        sampling, made, finish = body["sampling_params"], list[int](), None
        while finish is None and body["rid"] not in self.aborted:
            made.append(_draw(sampling, prompt, made, self.vocab_size))
            if made[-1] in sampling["stop_token_ids"] and len(made) > sampling["min_new_tokens"]:
                finish = {"type": "stop", "matched": made[-1]}
            elif len(made) >= sampling["max_new_tokens"]:
                finish = {"type": "length", "length": len(made)}
            shown = made[-1:] if self.disjoint else made
            event = self._event(body, prompt, shown, len(made), finish)
            await response.write(b"data: " + msgspec.json.encode(event) + b"\n\n")
            await asyncio.sleep(self.token_s)
        self.num_cached = 16
        await response.write(b"data: [DONE]\n\n")

    def _event(
        self,
        body: dict[str, Any],
        prompt: Sequence[int],
        token_ids: Sequence[int],
        num_made: int,
        finish: dict[str, Any] | None,
    ) -> dict[str, Any]:
        meta: dict[str, Any] = {
            "id": body.get("rid", "x"),
            "finish_reason": finish,
            "prompt_tokens": len(prompt),
            "completion_tokens": num_made,
            "cached_tokens": self.num_cached,
            "weight_version": "default",
            "e2e_latency": 0.1,
        }
        if body.get("return_logprob"):
            num_top = body.get("top_logprobs_num", 0)
            meta |= {
                "output_token_logprobs": [[-0.5, token, None] for token in token_ids],
                "output_top_logprobs": [_top(token, num_top) for token in token_ids],
            }
            if body.get("logprob_start_len") == 0:
                rest = prompt[1:]
                meta |= {
                    "input_token_logprobs": [
                        [None, prompt[0], None],
                        *([-1.5, token, None] for token in rest),
                    ],
                    "input_top_logprobs": [None, *(_top(token, num_top) for token in rest)],
                }
        return {"text": "", "output_ids": list(token_ids), "meta_info": meta}


def _top(token: int, num_top: int) -> list[list[Any]] | None:
    if not num_top:
        return None
    return [[-0.5 - rank, (token + rank) % 400, None] for rank in range(num_top)]


def _draw(
    sampling: dict[str, Any], prompt: Sequence[int], made: Sequence[int], vocab_size: int
) -> int:
    known = [*prompt, *made]
    bias = {int(token): value for token, value in sampling.get("logit_bias", {}).items()}
    forced = [token for token, value in bias.items() if value >= 100.0]
    forbidden = {token for token, value in bias.items() if value <= -100.0}
    choices = forced or [token for token in range(3, vocab_size) if token not in forbidden]
    if sampling["temperature"] == 0:
        source = random.Random(known[-1])
    else:
        source = random.Random(f"{sampling['sampling_seed']}:{len(known)}")
    return source.choice(choices)


async def _run(arguments: Sequence[str]) -> None:
    options = dict(pairwise(arguments))
    tokenizer = Tokenizer.load(Path(options["--model-path"]))
    settings = yaml.safe_load(Path(options["--config"]).read_text())
    server = SglangServer(tokenizer, tokenizer.vocab_size, api_key=settings["api-key"])
    async with listening(server.handle, int(options["--port"])):
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_run(sys.argv))

"""A real HTTP server that answers as the documentation of SGLang, TGI or TensorRT-LLM says.

None of them runs on processors, so this stands in for each: what it is asked, and what it answers,
is written after SGLang's ``python/sglang/srt/entrypoints/openai`` (with ``return_token_ids``), TGI
3.3's OpenAPI document and TensorRT-LLM 1.2's ``docs/source/commands/trtllm-serve``.
"""

from __future__ import annotations

import asyncio
import os
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
from millrace.schemas.engines import EngineKind
from tests.workers.servers.stand_ins.listening import break_off, event_stream, listening

_WORDS = (" mill", " wheel", " über", " 你好", " turns", " says")
_ALL = frozenset(
    {
        *("model", "prompt", "max_tokens", "temperature", "top_p", "seed"),
        *("stream", "stream_options"),
    }
)
_IDS = frozenset({"top_k", "min_p", "stop_token_ids", "ignore_eos", "logit_bias"})
KNOWN = {
    EngineKind.SGLANG: _ALL
    | _IDS
    | {
        *("min_tokens", "repetition_penalty", "presence_penalty", "frequency_penalty"),
        *("skip_special_tokens", "no_stop_trim", "return_token_ids", "rid", "cache_salt"),
        *("priority", "regex", "ebnf", "json_schema"),
    },
    EngineKind.TGI: _ALL | {"repetition_penalty"},
    EngineKind.TRTLLM: _ALL | _IDS | {"include_stop_str_in_output", "detokenize"},
}
VERSIONS = {EngineKind.SGLANG: "0.5.20", EngineKind.TGI: "3.3.7", EngineKind.TRTLLM: "1.2.0"}
_OPEN = ("/health", "/info", "/metrics")
_METRICS = {
    EngineKind.SGLANG: 'sglang:token_usage{model_name="demo",tp_rank="0"} 0.25\n',
    EngineKind.TGI: (
        'tgi_batch_inference_count{method="prefill"} 3\n'
        'tgi_batch_inference_count{method="decode"} 40\n'
    ),
}


@dataclass
class CompletionsServer:
    """Draws at random: at temperature 0 what comes follows from what came last, otherwise from seed
    and place. ``calls`` are the streams that it was asked for, ``breaks_at`` breaks a call by its
    number behind so many tokens, ``busy`` are the numbers of calls that it has no room for.
    ``tells_ids``: it knows return_token_ids. ``num_cached`` tokens of each prompt are cached, until
    the cache is emptied."""

    kind: EngineKind
    tokenizer: Tokenizer
    version: Any = ""
    window: int = 128
    room: int = 4
    api_key: str = ""
    token_s: float = 0.0
    end_at: int | None = None
    tells_ids: bool = True
    info: dict[str, Any] = field(default_factory=dict)
    steps: list[Any] = field(default_factory=list)
    breaks_at: dict[int, int] = field(default_factory=dict)
    busy: frozenset[int] = frozenset()
    num_running: int = 0
    num_cached: int = 16
    calls: list[dict[str, Any]] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        is_known = request.headers.get("Authorization", "") == f"Bearer {self.api_key}"
        if self.api_key and not is_known and request.path not in _OPEN:
            return web.json_response({"error": "Unauthorized"}, status=401)
        if request.path == "/v1/completions":
            return await self._complete(request)
        if request.path == "/abort_request":
            self.aborted.append((await request.json())["rid"])
            return web.Response()
        if request.path == "/flush_cache":
            self.num_cached = 0
            return web.Response()
        if request.path == "/metrics" and self.kind in _METRICS:
            return web.Response(text=_METRICS[self.kind])
        answer = self._facts(request.path)
        if answer is None:
            return web.json_response({"detail": "Not Found"}, status=404)
        return web.json_response(answer)

    def _facts(self, path: str) -> Any:
        model: dict[str, Any] = {"id": "demo", "object": "model"}
        version = VERSIONS[self.kind] if self.version == "" else self.version
        if self.kind is EngineKind.SGLANG:
            model["max_model_len"] = self.window
        facts: dict[str, Any] = {
            "/health": {},
            "/v1/models": {"object": "list", "data": [model]},
        }
        match self.kind:
            case EngineKind.SGLANG:
                facts["/server_info"] = {
                    "version": version,
                    "enable_priority_scheduling": True,
                    "grammar_backend": "llguidance",
                    "max_running_requests": None,
                    "max_total_num_tokens": 4096,
                    "internal_states": [{"max_running_requests": self.room}],
                    **self.info,
                }
            case EngineKind.TGI:
                facts["/info"] = {
                    "version": version,
                    "model_id": "demo",
                    "max_concurrent_requests": self.room,
                    "max_input_tokens": self.window - 1,
                    "max_total_tokens": self.window,
                    **self.info,
                }
            case _:
                facts["/version"] = {"version": version}
        if path == "/metrics":
            # What was told is gone.
            told, self.steps = self.steps, []
            return told
        return facts.get(path)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        unknown = sorted(body.keys() - KNOWN[self.kind])
        if unknown or body.get("repetition_penalty", 1.0) > 2.0:
            error = {"message": f"no: {unknown}, or repetition_penalty is over 2", "code": 400}
            return web.json_response({"object": "error", **error}, status=400)
        if not body.get("stream"):
            prompt = self.tokenizer.encode(body["prompt"])
            choice = {"index": 0, "text": "x", "finish_reason": "length"}
            if body.get("return_token_ids") and self.tells_ids:
                choice |= {"token_ids": [40], "prompt_token_ids": prompt}
            usage = {"prompt_tokens": len(prompt), "completion_tokens": 1}
            return web.json_response({"choices": [choice], "usage": usage})
        self.calls.append(body)
        number = len(self.calls)
        is_full = self.kind is EngineKind.TGI and self.num_running >= self.room
        if is_full or number in self.busy:
            return web.json_response({"error": "Model is overloaded"}, status=429)
        async with event_stream(self, request) as response:
            await self._stream(response, body, number)
        return response

    async def _stream(
        self, response: web.StreamResponse, body: dict[str, Any], number: int
    ) -> None:
        has_ids = self.kind is not EngineKind.TGI
        made: list[Any] = []
        reason = None
        while reason is None and body.get("rid") not in self.aborted:
            if len(made) == self.breaks_at.get(number):
                break_off(response)
                return
            if not has_ids:
                made.append(self._word(body, made))
                reason = "stop" if len(made) == self.end_at else None
            else:
                made.append(self._token(body, made))
                is_late = len(made) > body.get("min_tokens", 0)
                reason = "stop" if made[-1] in body["stop_token_ids"] and is_late else None
            if reason is None and len(made) == body["max_tokens"]:
                reason = "length"
            choice: dict[str, Any] = {"index": 0, "text": "", "finish_reason": reason}
            if has_ids:
                choice["token_ids"] = made[-1:]
            else:
                choice |= {"text": made[-1], "finish_reason": reason or ""}
            await response.write(_data({"id": "cmpl-1", "choices": [choice], "usage": None}))
            await asyncio.sleep(self.token_s)
        if has_ids:
            usage = {"prompt_tokens_details": {"cached_tokens": self.num_cached}}
            await response.write(_data({"id": "cmpl-1", "choices": [], "usage": usage}))
        self.num_cached = 16
        await response.write(b"data: [DONE]\n\n")

    def _word(self, body: dict[str, Any], made: Sequence[str]) -> str:
        seed = body["seed"] if body["temperature"] else ""
        return random.Random(f"{seed}:{body['prompt']}{''.join(made)}").choice(_WORDS)

    def _token(self, body: dict[str, Any], made: Sequence[int]) -> int:
        if len(made) == self.end_at:
            return self.tokenizer.eos_token_ids[0]
        known = [*body["prompt"], *made]
        bias = {int(token): value for token, value in body.get("logit_bias", {}).items()}
        forced = [token for token, value in bias.items() if value >= 100.0]
        forbidden = {token for token, value in bias.items() if value <= -100.0}
        free = [one for one in range(5, self.tokenizer.vocab_size) if one not in forbidden]
        greedy = body["temperature"] == 0
        source = random.Random(known[-1] if greedy else f"{body['seed']}:{len(known)}")
        return source.choice(forced or free)


def _data(event: Any) -> bytes:
    return b"data: " + msgspec.json.encode(event) + b"\n\n"


async def _run(kind: EngineKind, arguments: Sequence[str]) -> None:
    options, api_key = dict(pairwise(arguments)), ""
    match kind:
        case EngineKind.SGLANG:
            folder = options["--model-path"]
            api_key = yaml.safe_load(Path(options["--config"]).read_text())["api-key"]
        case EngineKind.TGI:
            folder, api_key = options["--model-id"], os.environ["API_KEY"]
        case _:
            assert arguments[0] == "serve"
            folder = arguments[1]
    server = CompletionsServer(kind, Tokenizer.load(Path(folder)), api_key=api_key)
    async with listening(server.handle, int(options["--port"])):
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_run(EngineKind(sys.argv[1]), sys.argv[2:]))

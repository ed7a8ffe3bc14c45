"""How long streams stand still when the engine's server is killed under them."""

from __future__ import annotations

import asyncio
import datetime
import json
import time
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.engines.servers import MAX_NUM_SEQUENCES, serving
from benchmarks.support.prompts import Prompt, distinct_prompts
from benchmarks.support.sse_load import COMPLETIONS, run_load
from millrace.registry.catalogue import Catalogue
from millrace.schemas.engines import EngineKind
from tests.support.engine_servers import server_process
from tests.support.servers import free_port
from tests.support.system import System

_NUM_STREAMS = 20
_NUM_PROMPT_TOKENS = 32
_NUM_TOKENS = 400
_NUM_FIRST_TOKENS = 8
_VOCAB_SIZE = 8_000
_RUNS_FOR_S = 3.0
_STARTS_WITHIN_S = 400.0
_READY = "a new engine runs"
_PROGRAMS = {EngineKind.VLLM: "vllm", EngineKind.LLAMACPP: "llama-server"}


class KilledFigures(msgspec.Struct, frozen=True, kw_only=True):
    """``ready_after_s`` from the kill to the next engine; ``gaps_s``, of each stream, from there to
    its next token, shortest first; ``alone_s``, how long a new server itself takes to the first
    tokens of prompts as long as prompt and output were then. ``num_tokens`` are all that came, of
    those that were due."""

    ready_after_s: float
    gaps_s: tuple[float, ...]
    alone_s: tuple[float, ...]
    num_tokens: int
    num_due_tokens: int


def measure_kill(kind: EngineKind, model: Path, folder: Path) -> KilledFigures:
    """Kill the server of ``millrace up --engine KIND`` while 20 streams run. Raises RuntimeError if
    one of them does not reach its end."""
    arguments = ("--port", str(free_port()), "--model", str(model), "--engine", kind.value)
    system = System(
        folder,
        arguments,
        starts_within_s=_STARTS_WITHIN_S,
        environment={"MILLRACE_WORKER__ENGINE__MAX_NUM_SEQUENCES": str(MAX_NUM_SEQUENCES)},
    ).start()
    name = Catalogue({}).entry_for(str(model)).name
    try:
        ready_after_s, gaps_s, lengths, num_tokens = asyncio.run(
            _killed(system, _PROGRAMS[kind], name)
        )
    finally:
        system.stop()
    with serving(kind.value, model, folder) as url:
        alone_s = asyncio.run(_first_tokens_s(url, name, lengths))
    return KilledFigures(
        ready_after_s=ready_after_s,
        gaps_s=tuple(sorted(gaps_s)),
        alone_s=tuple(sorted(alone_s)),
        num_tokens=num_tokens,
        num_due_tokens=_NUM_STREAMS * _NUM_TOKENS,
    )


async def _killed(
    system: System, program: str, model: str
) -> tuple[float, list[float], list[int], int]:
    """Seconds from the kill to the next engine, and from there to each stream's next token; how
    long each stream was then, in tokens; how many tokens came in all."""
    prompts = distinct_prompts(_NUM_STREAMS, _NUM_PROMPT_TOKENS, _VOCAB_SIZE, seed=1)
    bodies = [_body(model, prompt, _NUM_TOKENS) for prompt in prompts]
    offset_s = time.time() - time.perf_counter()
    running = asyncio.create_task(run_load(system.http, bodies, _NUM_STREAMS, COMPLETIONS))
    await asyncio.sleep(_RUNS_FOR_S)
    killed_s = time.time()
    server_process(system, program).kill()
    result = await running
    ready_s = _ready_at(system)
    next_s, lengths = [], []
    for request in result.requests:
        num_before = sum(at_s + offset_s <= ready_s for at_s in request.parts_s)
        next_s.append(request.parts_s[num_before] + offset_s - ready_s)
        lengths.append(_NUM_PROMPT_TOKENS + num_before)
    num_tokens = sum(request.num_tokens for request in result.requests)
    return ready_s - killed_s, next_s, lengths, num_tokens


async def _first_tokens_s(url: str, model: str, lengths: list[int]) -> list[float]:
    """Seconds to the first token of each prompt, all sent at once."""
    prompts = [
        distinct_prompts(1, length, _VOCAB_SIZE, seed=2 + number)[0]
        for number, length in enumerate(lengths)
    ]
    bodies = [_body(model, prompt, _NUM_FIRST_TOKENS) for prompt in prompts]
    sent_s = time.perf_counter()
    result = await run_load(url, bodies, len(bodies), COMPLETIONS)
    return [request.parts_s[0] - sent_s for request in result.requests]


def _body(model: str, prompt: Prompt, num_tokens: int) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }


def _ready_at(system: System) -> float:
    """UTC epoch, by the worker's log."""
    for log in sorted((system.data / "logs").glob("worker-1*")):
        for line in log.read_text().splitlines():
            if _READY in line:
                said = json.loads(line)["time"]
                return datetime.datetime.fromisoformat(said).timestamp()
    raise RuntimeError("the worker did not start another engine")

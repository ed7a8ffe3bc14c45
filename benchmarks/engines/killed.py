"""How long streams stand still when the engine's server is killed under them."""

from __future__ import annotations

import asyncio
import datetime
import json
import time
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.support.prompts import Prompt, distinct_prompts
from benchmarks.support.sse_load import COMPLETIONS, run_load
from registry.catalogue import Catalogue
from schemas.engines import EngineKind
from tests.support.engine_servers import server_process
from tests.support.servers import free_port
from tests.support.system import System

_NUM_STREAMS = 20
_NUM_PROMPT_TOKENS = 32
_NUM_TOKENS = 400
_VOCAB_SIZE = 8_000
_RUNS_FOR_S = 3.0
_STARTS_WITHIN_S = 400.0
_READY = "a new engine runs"
_PROGRAMS = {EngineKind.VLLM: "vllm", EngineKind.LLAMACPP: "llama-server"}


class KilledFigures(msgspec.Struct, frozen=True, kw_only=True):
    """``ready_after_s`` from the kill to the next engine; ``gaps_s``, of each stream, from there to
    its next token, shortest first. ``num_tokens`` are all that came, of those that were due."""

    ready_after_s: float
    gaps_s: tuple[float, ...]
    num_tokens: int
    num_due_tokens: int


def measure_kill(kind: EngineKind, model: Path, folder: Path) -> KilledFigures:
    """Kill the server of ``millrace up --engine KIND`` while 20 streams run. Raises RuntimeError if
    one of them does not reach its end."""
    arguments = ("--port", str(free_port()), "--model", str(model), "--engine", kind.value)
    system = System(folder, arguments, starts_within_s=_STARTS_WITHIN_S).start()
    try:
        name = Catalogue({}).entry_for(str(model)).name
        return asyncio.run(_killed(system, _PROGRAMS[kind], name))
    finally:
        system.stop()


async def _killed(system: System, program: str, model: str) -> KilledFigures:
    prompts = distinct_prompts(_NUM_STREAMS, _NUM_PROMPT_TOKENS, _VOCAB_SIZE, seed=1)
    bodies = [_body(model, prompt) for prompt in prompts]
    offset_s = time.time() - time.perf_counter()
    running = asyncio.create_task(run_load(system.http, bodies, _NUM_STREAMS, COMPLETIONS))
    await asyncio.sleep(_RUNS_FOR_S)
    killed_s = time.time()
    server_process(system, program).kill()
    result = await running
    ready_s = _ready_at(system)
    gaps_s = [
        next(at_s for at_s in request.parts_s if at_s + offset_s > ready_s) + offset_s - ready_s
        for request in result.requests
    ]
    return KilledFigures(
        ready_after_s=ready_s - killed_s,
        gaps_s=tuple(sorted(gaps_s)),
        num_tokens=sum(request.num_tokens for request in result.requests),
        num_due_tokens=_NUM_STREAMS * _NUM_TOKENS,
    )


def _body(model: str, prompt: Prompt) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": _NUM_TOKENS,
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

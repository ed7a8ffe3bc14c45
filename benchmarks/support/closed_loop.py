"""Closed loops on the engine alone: each stream sends its next request when one ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import msgspec

from benchmarks.support.figures import RequestTimes
from benchmarks.support.prompts import Prompt
from millrace.engine.step.engine import Engine
from millrace.engine.types import EngineRequest
from millrace.schemas.models.adapters import AdapterRef
from millrace.schemas.sampling import SamplingParams


def run_closed_loop(
    engine: Engine,
    prompts: Sequence[Prompt],
    num_output_tokens: Sequence[int],
    streams: int,
    on_step: Callable[[Engine], object] = lambda _: None,
    adapters: Sequence[AdapterRef] = (),
) -> list[RequestTimes]:
    """Answer all prompts greedily with exactly ``num_output_tokens``, ``streams`` at a time.

    The engine must be idle, and is idle again afterwards. ``on_step`` is called after each step.
    Requests use the ``adapters`` in turns. Raises RuntimeError when a request fails.
    """
    waiting = iter(list(enumerate(zip(prompts, num_output_tokens, strict=True))))
    sent_s: dict[str, float] = {}
    tokens_s: dict[str, list[float]] = {}
    running = 0

    def send_next() -> int:
        for index, (prompt, num_tokens) in waiting:
            request_id = str(index)
            sent_s[request_id], tokens_s[request_id] = time.perf_counter(), []
            adapter = adapters[index % len(adapters)] if adapters else None
            request = greedy_request(request_id, prompt, num_tokens)
            engine.add(msgspec.structs.replace(request, adapter=adapter))
            return 1
        return 0

    for _ in range(streams):
        running += send_next()
    while running:
        outputs = engine.step()
        now_s = time.perf_counter()
        for output in outputs:
            if output.error is not None:
                raise RuntimeError(f"a request failed: {output.error[1]}")
            tokens_s[output.request_id] += [now_s] * len(output.token_ids)
            if output.finished:
                running += send_next() - 1
        on_step(engine)
    return [
        RequestTimes(sent_s[request_id], tuple(times), len(times))
        for request_id, times in tokens_s.items()
    ]


def greedy_request(request_id: str, prompt: Prompt, num_output_tokens: int) -> EngineRequest:
    """Return a request that generates exactly ``num_output_tokens`` tokens."""
    sampling = SamplingParams(max_tokens=num_output_tokens, temperature=0.0, ignore_eos=True)
    return EngineRequest(request_id=request_id, prompt_token_ids=prompt, sampling=sampling)


def answers(engine: Engine, requests: Sequence[EngineRequest]) -> dict[str, list[int]]:
    """Serve all requests together; return their tokens by id. Raises RuntimeError if one fails."""
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for output in engine.step():
            if output.error is not None:
                raise RuntimeError(f"request {output.request_id} failed: {output.error}")
            tokens[output.request_id] += output.token_ids
    return tokens

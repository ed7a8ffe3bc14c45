"""Loads for every system, and figures of its runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from benchmarks.support.figures import Figures, RequestTimes, figures_of, medians
from benchmarks.support.prompts import Prompt, shared_prefix_prompts
from millrace.engine.threads.choice import configure_threads
from millrace.schemas.config import EngineConfig

_RUN_STRIDE = 1_000


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """Closed loop of ``streams`` clients that send ``num_requests`` in all.

    Each prompt begins with ``num_shared_tokens`` common to a run, followed by its own tokens.
    """

    name: str
    num_shared_tokens: int
    num_own_tokens: int
    num_output_tokens: int
    streams: int
    num_requests: int

    def prompts(self, run: int, vocab_size: int) -> list[Prompt]:
        """Return the prompts of one run; no other run shares a prompt that a cache could hold."""
        return shared_prefix_prompts(
            self.num_requests,
            self.num_shared_tokens,
            self.num_own_tokens,
            vocab_size,
            seed=_RUN_STRIDE * self.streams + self.num_shared_tokens + run,
        )


def distinct(streams: int, num_requests: int) -> Load:
    """Return a load of distinct prompts of 128 tokens, with answers of 64."""
    return Load(
        name=f"128 in, 64 out, {streams} streams",
        num_shared_tokens=0,
        num_own_tokens=128,
        num_output_tokens=64,
        streams=streams,
        num_requests=num_requests,
    )


DISTINCT_LOADS = (distinct(1, 4), distinct(8, 24), distinct(32, 96))
LOADS = (
    *DISTINCT_LOADS,
    Load(
        name="512 shared + 32 in, 32 out, 16 streams",
        num_shared_tokens=512,
        num_own_tokens=32,
        num_output_tokens=32,
        streams=16,
        num_requests=64,
    ),
)


class MissingTokensError(Exception):
    """Failure of a system to generate all requested tokens."""


def measure(
    send: Callable[[Load, Sequence[Prompt]], Sequence[RequestTimes]],
    load: Load,
    runs: int,
    vocab_size: int,
    first_run: int = 0,
) -> Figures:
    """Return the medians over ``runs`` runs of a load, after one round of its clients as warm-up.

    The warm-up has the prompts of run ``first_run``. ``send`` sends prompts and returns when all
    are answered. Raises MissingTokensError.
    """
    send(load, load.prompts(first_run, vocab_size)[: load.streams])
    measured = []
    for run in range(first_run + 1, first_run + runs + 1):
        requests = send(load, load.prompts(run, vocab_size))
        for request in requests:
            if request.num_tokens != load.num_output_tokens:
                raise MissingTokensError(
                    f"{load.name}: {request.num_tokens} tokens came, {load.num_output_tokens} "
                    "were asked for"
                )
        measured.append(figures_of(requests))
    return medians(measured)


Send = Callable[[Load, Sequence[Prompt]], Sequence[RequestTimes]]
MILLRACE_ENGINE = "millrace-engine"
TRANSFORMERS = "transformers"
# The library's default size of a cache. A larger one is slower without flash attention: 70 tokens/s
# with four times these pages, compared to 80.
_PAGE_TOKENS = 256
_CACHE_TOKENS = 16_384
_LIMIT_S = 600.0


def _millrace(path: Path, streams: int) -> Send:
    from benchmarks.support.closed_loop import run_closed_loop
    from millrace.engine.step.engine import Engine

    config = EngineConfig(dtype="bfloat16", device="cpu", max_num_sequences=streams)
    engine = Engine.load(path, config)

    def send(load: Load, prompts: Sequence[Prompt]) -> Sequence[RequestTimes]:
        return run_closed_loop(
            engine, prompts, [load.num_output_tokens] * len(prompts), load.streams
        )

    return send


def _transformers(path: Path, streams: int) -> Send:
    import torch
    from transformers import AutoModelForCausalLM

    from benchmarks.support.transformers_batching import answered, continuous_batching

    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.bfloat16, attn_implementation="sdpa"
    )
    manager = continuous_batching(
        model,
        {"do_sample": False},
        page_tokens=_PAGE_TOKENS,
        num_blocks=_CACHE_TOKENS // _PAGE_TOKENS,
        max_batch_tokens=512,
        max_requests_per_batch=streams,
    )

    def send(load: Load, prompts: Sequence[Prompt]) -> Sequence[RequestTimes]:
        requests = [(prompt, load.num_output_tokens) for prompt in prompts]
        manager.start()
        try:
            measured = answered(manager, requests, load.streams, _LIMIT_S)
        finally:
            manager.stop(block=True, timeout=30.0, keep_for_next_session=True)
        if len(measured) < len(requests):
            raise RuntimeError("transformers' continuous batching takes too long")
        return measured

    return send


_STARTS: dict[str, Callable[[Path, int], Send]] = {
    MILLRACE_ENGINE: _millrace,
    TRANSFORMERS: _transformers,
}


def measure_alone(system: str, model: Path, loads: Sequence[Load], runs: int) -> dict[str, Figures]:
    """Measure a system by load, in a process that has not imported torch."""
    configure_threads(EngineConfig(), shared=False)
    from millrace.registry.checkpoints.checkpoint import read_model_config

    vocab_size = read_model_config(model).vocab_size
    send = _STARTS[system](model, max(load.streams for load in loads))
    return {load.name: measure(send, load, runs, vocab_size) for load in loads}

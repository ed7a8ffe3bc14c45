"""Systems that run in the process that measures them, one process each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.peers.loads import Load, measure
from benchmarks.support.figures import Figures, RequestTimes
from benchmarks.support.prompts import Prompt
from millrace.engine.threads.choice import configure_threads
from millrace.schemas.config import EngineConfig

Send = Callable[[Load, Sequence[Prompt]], Sequence[RequestTimes]]
MILLRACE_ENGINE = "millrace-engine"
TRANSFORMERS = "transformers"


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
    from benchmarks.peers.transformers_batching import ContinuousBatching

    return ContinuousBatching(path, streams).send


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

"""Systems that run in the process that measures them, one process each.

    python -m benchmarks.peers.alone SYSTEM --model PATH --loads JSON [--runs N] [--threads N]

Prints one JSON object for each load as it is done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from benchmarks.peers.loads import Load, measure
from benchmarks.support.command import command_parser
from benchmarks.support.figures import Figures, RequestTimes
from benchmarks.support.prompts import Prompt
from millrace.engine.threads.choice import configure_threads
from millrace.schemas.config import EngineConfig

Send = Callable[[Load, Sequence[Prompt]], Sequence[RequestTimes]]
MILLRACE_ENGINE = "millrace-engine"
TRANSFORMERS = "transformers"


class LoadFigures(msgspec.Struct, frozen=True):
    """One line of the output."""

    load: str
    figures: Figures


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


def main() -> None:
    parser = command_parser("peers.alone", __doc__)
    parser.add_argument("system", choices=sorted(_STARTS))
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--loads", required=True, help="JSON list of loads")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=0, help="0 (the default) uses all cores")
    arguments = parser.parse_args()
    configure_threads(EngineConfig(num_threads=arguments.threads), shared=False)
    from millrace.registry.checkpoints.checkpoint import read_model_config

    loads = msgspec.json.decode(arguments.loads, type=list[Load])
    vocab_size = read_model_config(arguments.model).vocab_size
    send = _STARTS[arguments.system](arguments.model, max(load.streams for load in loads))
    for load in loads:
        figures = measure(send, load, arguments.runs, vocab_size)
        print(msgspec.json.encode(LoadFigures(load.name, figures)).decode(), flush=True)


if __name__ == "__main__":
    main()

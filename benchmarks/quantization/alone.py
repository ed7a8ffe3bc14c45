"""The engine alone with weights of one kind, in a process that has all memory and threads.

    python -m benchmarks.quantization.alone KIND --model PATH [--runs N]

Prints one JSON object: tokens a second by streams, and the bytes of weights that a step reads.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from benchmarks.peers.loads import distinct, measure
from benchmarks.quantization.kinds import KINDS, LOADS, settings
from benchmarks.support.closed_loop import run_closed_loop
from benchmarks.support.command import command_parser
from benchmarks.support.figures import Figures
from millrace.engine.threads.choice import configure_threads
from millrace.schemas.config import EngineConfig


class AloneFigures(msgspec.Struct, frozen=True, kw_only=True):
    """``figures`` by load; ``step_ms``: the median step of one stream; ``weight_bytes`` are read in
    each."""

    figures: dict[str, Figures]
    step_ms: float
    weight_bytes: int

    @property
    def bytes_per_s(self) -> float:
        """At what rate the weights are read at one stream, all else of a step included."""
        return self.weight_bytes / self.step_ms * 1e3


def measure_alone(kind: str, path: Path, runs: int) -> AloneFigures:
    """Closed loops of 1, 8 and 32 streams. Threads are torch's."""
    from millrace.engine.step.engine import Engine
    from millrace.registry.checkpoints.checkpoint import read_model_config

    config = read_model_config(path)
    engine = Engine.load(path, settings(kind))
    figures = {
        load.name: measure(
            lambda load, prompts: run_closed_loop(
                engine, prompts, [load.num_output_tokens] * len(prompts), load.streams
            ),
            load,
            runs,
            config.vocab_size,
        )
        for load in LOADS
    }
    return AloneFigures(
        figures=figures,
        step_ms=figures[distinct(1, 4).name].itl_p50_ms,
        weight_bytes=engine.weight_bytes,
    )


def main() -> None:
    parser = command_parser("quantization.alone", __doc__)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--runs", type=int, default=3)
    arguments = parser.parse_args()
    configure_threads(EngineConfig(), shared=False)
    measured = measure_alone(arguments.kind, arguments.model, arguments.runs)
    print(msgspec.json.encode(measured).decode())


if __name__ == "__main__":
    main()

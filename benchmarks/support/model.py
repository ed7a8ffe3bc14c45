"""The model of a benchmark of the engine, on threads that are set before torch is imported."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from millrace.engine.threads.choice import configure_threads
from millrace.schemas.config import EngineConfig


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """``--model`` and ``--threads``."""
    parser.add_argument("--model", type=Path, help="checkpoint folder (default: a 100M Llama)")
    parser.add_argument("--threads", type=int, default=0, help="0 (the default) uses all cores")


@contextmanager
def measured_model(arguments: argparse.Namespace) -> Iterator[Path]:
    """The folder of ``--model``, or of a 100M Llama with random weights while this is entered."""
    configure_threads(EngineConfig(num_threads=arguments.threads), shared=False)
    from benchmarks.checkpoints import write_llama

    with tempfile.TemporaryDirectory() as folder:
        yield arguments.model or write_llama(Path(folder))

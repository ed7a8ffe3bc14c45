"""Model of an engine benchmark, with threads set before torch is imported."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from millrace.engine.threads.choice import configure_threads
from millrace.schemas.config import EngineConfig


@contextmanager
def measured_model(model: Path | None, threads: int) -> Iterator[Path]:
    """Yield ``model`` or a new 100M Llama with random weights; 0 ``threads`` means all cores."""
    configure_threads(EngineConfig(num_threads=threads), shared=False)
    from benchmarks.checkpoints import write_llama

    with tempfile.TemporaryDirectory() as folder:
        yield model or write_llama(Path(folder))


def write_100m(path: Path) -> Path:
    """Write the 100M Llama; this imports torch, so call it in a new process where that matters."""
    from benchmarks.checkpoints import write_llama

    return write_llama(path)

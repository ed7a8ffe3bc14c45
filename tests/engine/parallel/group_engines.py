"""Engines of a device's runner, over several ranks or one: real processes on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from millrace.engine.parallel.device_runner import DeviceGroupRunner
from millrace.engine.step.engine import Engine
from millrace.schemas.config import EngineConfig
from tests.engine.parallel import shapes

# Few layers: each of the steps that are recorded has them.
SHAPE: dict[str, Any] = shapes.SHAPE | {"num_hidden_layers": 2}
MOE: dict[str, Any] = shapes.MOE | {"num_hidden_layers": 2}


def load(path: Path, ranks: int, **changes: Any) -> Engine:
    """Load an engine of ``ranks`` ranks, or of as many a stage, with few sequences and tokens, so
    that few steps are recorded."""
    settings: dict[str, Any] = {
        "device": "cpu",
        "kernels": "reference",
        "num_threads": 1,
        "num_blocks": 64,
        "max_num_sequences": 6,
        "max_batch_tokens": 48,
    }
    return Engine.load(path, EngineConfig(**settings | {"tensor_parallel": ranks} | changes))


def runner_of(engine: Engine) -> DeviceGroupRunner:
    runner = engine._runner
    assert isinstance(runner, DeviceGroupRunner)
    return runner

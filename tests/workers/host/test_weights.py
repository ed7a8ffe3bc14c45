"""Weights of a model's workers: all must be the same."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import pytest

from millrace.bus.memory import MemoryBroker, MemoryBus
from millrace.registry.checkpoints.fingerprint import weights_fingerprint
from millrace.schemas.control import WorkerStatus
from millrace.workers.host.weights import WeightsDifferError, check_weights
from tests.support.engine.checkpoints_made import write_checkpoint
from tests.support.manual_clock import ManualClock

_NOW_NS = 1_700_000_000_000_000_000
_OTHER = WorkerStatus(
    worker_id="w1-a",
    name="w1",
    model="demo",
    max_num_sequences=4,
    weights="aa",
    sent_ns=_NOW_NS - 500_000_000,
)


@pytest.mark.parametrize(
    "change",
    [
        {"weights": "bb"},
        {"weights": None},
        {"model": "another"},
        {"retired": True},
    ],
)
async def test_workers_of_equal_unknown_or_other_models_weights_do_not_matter(
    change: dict[str, object],
) -> None:
    bus = MemoryBus(MemoryBroker(ManualClock()))
    await bus.workers.announce(msgspec.structs.replace(_OTHER, **change))
    await check_weights(bus, "demo", "bb", _NOW_NS)


@pytest.mark.parametrize("weights", ["bb", ""])
async def test_other_weights_are_refused_by_name(weights: str) -> None:
    bus = MemoryBus(MemoryBroker(ManualClock()))
    await bus.workers.announce(_OTHER)
    with pytest.raises(WeightsDifferError, match="worker w1 serves the model demo"):
        await check_weights(bus, "demo", weights, _NOW_NS)
    await check_weights(bus, "demo", None, _NOW_NS)


async def test_a_worker_that_fell_silent_does_not_matter() -> None:
    bus = MemoryBus(MemoryBroker(ManualClock()))
    await bus.workers.announce(_OTHER)
    await check_weights(bus, "demo", "bb", _NOW_NS + 3_000_000_000)


def test_a_fingerprint_is_of_the_weights_alone(tmp_path: Path) -> None:
    first = write_checkpoint(tmp_path / "first")
    fingerprint = weights_fingerprint(first)
    assert len(fingerprint) == 16
    copy = shutil.copytree(first, tmp_path / "copy")
    (copy / "tokenizer_config.json").unlink()
    assert weights_fingerprint(copy) == fingerprint
    file = copy / "model.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    changed = weights_fingerprint(copy)
    assert changed not in (fingerprint, "")
    alone = shutil.copy(file, tmp_path / "alone.gguf")
    assert weights_fingerprint(Path(alone)) == weights_fingerprint(Path(alone))
    assert weights_fingerprint(tmp_path / "nowhere") == ""

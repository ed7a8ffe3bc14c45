"""Steps of ranks on CUDA devices where there are none: what is recorded asks the host for nothing,
and what is exchanged lies on the device."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from benchmarks.gpu_compile.models import CONFIGS
from millrace.registry.checkpoints.checkpoint import read_model_config
from millrace.schemas.config import EngineConfig
from millrace.workers.engine.device import loading as device_loading
from millrace.workers.engine.device_group.lead import Lead
from millrace.workers.engine.device_group.member_loop import MemberSteps
from millrace.workers.engine.device_group.ranks import DeviceRanks
from millrace.workers.engine.device_group.runner import DeviceGroupRunner
from millrace.workers.engine.settings import with_device_defaults
from millrace.workers.models.shard import Shard
from tests.workers.engine.device.pretended_device import (
    CUDA,
    Operations,
    PretendedDevice,
    ShapesOnly,
    pretending,
    replace_kernels,
)


class PretendedGroup:
    """In the place of NCCL: looks at what is exchanged, and at nothing in it."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def allreduce(self, tensors: list[torch.Tensor], _options: object) -> None:
        self._note("sum", *tensors)

    def _allgather_base(self, out: torch.Tensor, own: torch.Tensor, _options: object) -> None:
        assert out.numel() % own.numel() == 0
        assert out.dtype is own.dtype
        self._note("gather", out, own)

    def broadcast(self, tensors: list[torch.Tensor], _options: object) -> None:
        self._note("share", *tensors)

    def _note(self, name: str, *tensors: torch.Tensor) -> None:
        assert all(tensor.is_cuda and tensor.is_contiguous() for tensor in tensors)
        self.calls.append(name)


class PretendedRanks(DeviceRanks):
    """One that has met the others."""

    def __init__(self, rank: int, size: int, *, fixed: bool) -> None:
        self.rank = rank
        self.size = size
        self.group = PretendedGroup()
        self._group = self.group
        self._adds_in_order = fixed or size <= 4
        self._is_cuda = True
        self._why = ""
        options: Any = None
        self._gathering = self._summing = self._telling = options


class PretendedLead:
    """As far as recording goes."""

    def __init__(self, ranks: DeviceRanks) -> None:
        self.ranks = ranks


@pytest.mark.parametrize(
    ("model", "rank", "size", "config"),
    [
        pytest.param("Llama-3.1-8B", 0, 2, {"max_adapters": 2}, id="adapters"),
        pytest.param("Llama-3.1-8B", 1, 8, {"kv_cache_dtype": "fp8"}, id="eight ranks"),
        pytest.param("Llama-3.1-8B", 0, 8, {"deterministic": True}, id="deterministic"),
        pytest.param("Qwen3-30B-A3B", 1, 4, {"expert_parallel": True}, id="whole experts"),
    ],
)
def test_steps_are_recorded_without_the_host(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    model: str,
    rank: int,
    size: int,
    config: dict[str, Any],
) -> None:
    monkeypatch.setattr(device_loading, "DummyTensors", ShapesOnly)
    monkeypatch.setattr(device_loading, "is_interpreted", lambda: False)
    kernels = replace_kernels(monkeypatch)
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[model] | {"num_hidden_layers": 2}))
    given: dict[str, Any] = {
        "load_format": "dummy",
        "num_blocks": 128,
        "max_num_sequences": 3,
        "max_batch_tokens": 40,
    }
    engine = with_device_defaults(EngineConfig(**given | config), CUDA)
    operations = Operations()
    device = PretendedDevice(operations)
    ranks = PretendedRanks(rank, size, fixed=engine.deterministic)
    make: Any = partial(MemberSteps, ranks=ranks)
    if rank == 0:
        lead = cast(Lead, PretendedLead(ranks))
        make = partial(DeviceGroupRunner, lead=lead, is_row_exact=engine.deterministic)
    shard = Shard(rank, size, engine.expert_parallel)
    with pretending(operations):
        model_config = read_model_config(tmp_path)
        plans = device_loading.load_plans(tmp_path, model_config, engine, device, shard, ranks)
        device_loading.make_ready(plans, make)
    assert device.num_recorded >= 5
    launched = {kernel.name for kernel in kernels if kernel.num_launches}
    assert ("choose_kernel" in launched) == (rank == 0)
    # Of a step: the embedding, two sums a layer, the logits and the tokens.
    sums = "sum" if size > 4 and not engine.deterministic else "gather"
    assert ranks.group.calls[-7:] == [*[sums] * 5, "gather", "share"]

"""Steps of ranks on pretended CUDA devices: recorded steps need nothing from the host, and
exchanged tensors lie on the device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from benchmarks.gpu_compile.models import CONFIGS
from millrace.engine.devices.cuda import loading as device_loading
from millrace.engine.devices.cuda.inputs import NO_TABLES, ToldStep
from millrace.engine.devices.cuda.steps import DeviceSteps
from millrace.engine.kernels.gpu.step_inputs import StepShape
from millrace.engine.parallel.device_ranks import DeviceRanks, StageLinks, Way
from millrace.engine.parallel.lead import DeviceLead as Lead
from millrace.engine.parallel.loading import runner_of_rank_0
from millrace.engine.parallel.rank import MemberSteps, member_steps
from millrace.engine.parallel.rendezvous import RankExchange
from millrace.registry.checkpoints.checkpoint import read_model_config
from millrace.registry.checkpoints.shard import Shard
from tests.engine.devices.cuda.pretended_device import (
    CUDA,
    Operations,
    PretendedDevice,
    ShapesOnly,
    pretending,
    replace_kernels,
)
from tests.engine.support import resolved


class PretendedWork:
    """Handle of a send or a receive."""

    def wait(self) -> None:
        """Return at once: work launched later waits instead."""


class PretendedGroup:
    """Stand-in for NCCL that checks where tensors lie, and reads none of their contents."""

    def __init__(self, calls: list[str]) -> None:
        self.calls = calls

    def allreduce(self, tensors: list[torch.Tensor], _options: object) -> None:
        self._note("sum", *tensors)

    def _allgather_base(self, out: torch.Tensor, own: torch.Tensor, _options: object) -> None:
        assert out.numel() % own.numel() == 0
        assert out.dtype is own.dtype
        self._note("gather", out, own)

    def broadcast(self, tensors: list[torch.Tensor], _options: object) -> None:
        self._note("share", *tensors)

    def send(self, tensors: list[torch.Tensor], to: int, _tag: int) -> PretendedWork:
        self._note(f"send to {to}", *tensors)
        return PretendedWork()

    def recv(self, tensors: list[torch.Tensor], source: int, _tag: int) -> PretendedWork:
        self._note(f"receive from {source}", *tensors)
        return PretendedWork()

    def _note(self, name: str, *tensors: torch.Tensor) -> None:
        assert all(tensor.is_cuda and tensor.is_contiguous() for tensor in tensors)
        self.calls.append(name)


class PretendedExchange(RankExchange):
    """Exchange in which all ranks have met."""

    def __init__(self, calls: list[str]) -> None:
        self.is_cuda = True
        self._why = ""
        self._group = PretendedGroup(calls)


class PretendedLinks(StageLinks):
    """Links to and from all stages."""

    def __init__(self, shard: Shard, calls: list[str]) -> None:
        self._stage = shard.stage
        self._shard = shard
        self._hidden, self._results, self._rows = [Way(PretendedExchange(calls)) for _ in range(3)]


class PretendedRanks(DeviceRanks):
    """Rank that has met the others."""

    def __init__(self, shard: Shard, *, fixed: bool) -> None:
        self.rank = shard.rank
        self.size = shard.size
        self.calls: list[str] = []
        self._exchange = PretendedExchange(self.calls)
        self._adds_in_order = fixed or self.size <= 4
        self.links = PretendedLinks(shard, self.calls) if shard.num_stages > 1 else None
        options: Any = None
        self._gathering = self._summing = self._telling = options


class PretendedLead:
    """Rank 0 of a group, as far as recording needs it."""

    def __init__(self, ranks: DeviceRanks) -> None:
        self.ranks = ranks


def ready_steps(
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    model: str,
    shard: Shard,
    config: dict[str, Any],
    operations: Operations,
) -> tuple[DeviceSteps, PretendedRanks]:
    """Return the recorded steps of a rank, for a model of 2 layers."""
    monkeypatch.setattr(device_loading, "DummyTensors", ShapesOnly)
    monkeypatch.setattr(device_loading, "is_interpreted", lambda: False)
    (path / "config.json").write_text(json.dumps(CONFIGS[model] | {"num_hidden_layers": 2}))
    given: dict[str, Any] = {
        "load_format": "dummy",
        "num_blocks": 128,
        "max_num_sequences": 3,
        "max_batch_tokens": 40,
    }
    engine = resolved(path, on=CUDA, **given | config)
    device = PretendedDevice(operations)
    ranks = PretendedRanks(shard, fixed=engine.deterministic)
    collectives = ranks if shard.is_sliced else None
    plans = device_loading.load_plans(
        path, read_model_config(path), engine, device, shard, collectives
    )
    make: Any = member_steps(ranks, plans)
    if shard.rank == shard.stage == 0:
        lead = cast(Lead, PretendedLead(ranks))
        make = runner_of_rank_0(lead, plans)
    steps: DeviceSteps = device_loading.make_ready(plans, make)
    assert device.num_recorded >= 5
    return steps, ranks


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
    kernels = replace_kernels(monkeypatch)
    shard = Shard(rank, size, config.get("expert_parallel", False))
    operations = Operations()
    with pretending(operations):
        _, ranks = ready_steps(tmp_path, monkeypatch, model, shard, config, operations)
    launched = {kernel.name for kernel in kernels if kernel.num_launches}
    assert ("choose_kernel" in launched) == (rank == 0)
    # Of a step: the embedding, two sums a layer, the logits and the tokens.
    sums = "sum" if size > 4 and not config.get("deterministic") else "gather"
    assert ranks.calls[-7:] == [*[sums] * 5, "gather", "share"]


@pytest.mark.parametrize(
    ("shard", "recorded", "around"),
    [
        pytest.param(Shard(0, 2, False, 0, 2), ["gather"] * 3, ["send to 1"], id="rank 0"),
        pytest.param(Shard(1, 2, False, 0, 2), ["gather"] * 3, ["send to 1"], id="first stage"),
        pytest.param(
            Shard(0, 2, False, 1, 2),
            ["gather"] * 3,
            ["receive from 0", "send to 0", "send to 0"],
            id="last stage's rank 0",
        ),
        pytest.param(Shard(1, 2, False, 1, 2), ["gather"] * 3, ["receive from 0"], id="last stage"),
        pytest.param(Shard(0, 1, False, 0, 2), [], ["send to 1"], id="a rank each"),
    ],
)
def test_messages_between_stages_are_not_recorded(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    shard: Shard,
    recorded: list[str],
    around: list[str],
) -> None:
    """Messages between stages lie on the device. The recording of the first stage has the embedding
    and two sums, that of the last stage two sums and the logits; hidden states and results are sent
    outside of it."""
    replace_kernels(monkeypatch)
    operations = Operations()
    with pretending(operations):
        steps, ranks = ready_steps(tmp_path, monkeypatch, "Llama-3.1-8B", shard, {}, operations)
        assert ranks.calls[len(ranks.calls) - len(recorded) :] == recorded
        assert set(ranks.calls) == set(recorded)
        ranks.calls.clear()
        shape = StepShape(2, 2, 2, 2)
        packed = np.zeros(shape.num_packed, np.int64)
        step = ToldStep(shape, packed, NO_TABLES, None, is_recorded=True)
        with torch.inference_mode():
            if isinstance(steps, MemberSteps):
                steps.compute(step)
            else:
                steps._run(step)
    assert ranks.calls == around

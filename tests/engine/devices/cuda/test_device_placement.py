"""The runner of a CUDA device, without one: operands of a step lie on the device, and recorded
steps need nothing from the host."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.gpu_compile.models import CONFIGS
from millrace.engine.devices.cuda import loading as device_loading
from millrace.engine.devices.cuda.device import MemoryInfo
from millrace.engine.devices.cuda.runner import DeviceRunner
from millrace.engine.kernels.gpu.blocks import copy_blocks
from millrace.engine.step.engine import Engine
from millrace.engine.step.runner import InFlightStep
from millrace.engine.types import EngineRequest
from millrace.registry.checkpoints.checkpoint import read_model_config
from millrace.schemas.pooling import Pooling
from millrace.schemas.sampling import SamplingParams
from tests.engine.devices.cuda.pretended_device import (
    CUDA,
    Kernel,
    Operations,
    PretendedDevice,
    ShapesOnly,
    pretending,
    replace_kernels,
)
from tests.engine.support import drain, prompt, request, resolved

GIB = 1 << 30


class Pretence:
    """Factory of runners by models' shapes, on a device of 140 GiB."""

    def __init__(self, folder: Path, kernels: list[Kernel]) -> None:
        self.operations = Operations()
        self.device = PretendedDevice(self.operations, MemoryInfo(140 * GIB, 120 * GIB, 16 * GIB))
        self.kernels = {kernel.name: kernel for kernel in kernels}
        self._folder = folder

    def runner(self, model: str, changes: dict[str, Any] | None = None, **config: Any) -> Any:
        self._folder.joinpath("config.json").write_text(
            json.dumps(CONFIGS[model] | (changes or {}))
        )
        given: dict[str, Any] = {
            "load_format": "dummy",
            "num_blocks": 128,
            "max_num_sequences": 12,
            "max_batch_tokens": 64,
        }
        engine = resolved(self._folder, on=CUDA, **(given | config))
        with pretending(self.operations):
            return device_loading.load_device_runner(
                self._folder, read_model_config(self._folder), engine, self.device
            )

    def engine(self, runner: DeviceRunner, **config: Any) -> Engine:
        """Return an engine whose runner and cache enter the pretence; contents that the engine
        itself reads are arbitrary."""
        launch = runner.launch

        def launch_pretended(plan: Any) -> InFlightStep:
            with pretending(self.operations):
                step = launch(plan)
            assert all(chunk.total.is_cuda for chunk in step.pooled)
            assert step.logits.device.type == "cpu"
            ones = torch.ones(runner.config.hidden_size)
            return step._replace(
                logits=torch.zeros(step.logits.shape),
                pooled=[chunk._replace(total=ones) for chunk in step.pooled],
            )

        runner.launch = launch_pretended  # type: ignore[method-assign]
        for name in ("copy_block", "scrub"):
            setattr(runner.cache, name, self._inside(getattr(runner.cache, name)))
        return Engine(runner, resolved(self._folder, on=CUDA, host_cache_bytes=0, **config))

    def _inside(self, work: Callable[..., Any]) -> Callable[..., Any]:
        def pretended(*args: Any) -> Any:
            with pretending(self.operations):
                return work(*args)

        return pretended


@pytest.fixture
def pretence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pretence:
    monkeypatch.setattr(device_loading, "DummyTensors", ShapesOnly)
    monkeypatch.setattr(device_loading, "is_interpreted", lambda: False)
    return Pretence(tmp_path, replace_kernels(monkeypatch))


@pytest.mark.parametrize(
    ("model", "config"),
    [
        pytest.param("Llama-3.1-8B", {}, id="bf16"),
        pytest.param("Llama-3.1-8B", {"kv_cache_dtype": "fp8"}, id="fp8"),
        pytest.param("Qwen3-30B-A3B", {}, id="experts"),
        pytest.param("Qwen3-30B-A3B", {"deterministic": True}, id="experts-deterministic"),
        pytest.param("head-dim-80", {}, id="windows"),
        pytest.param("head-dim-64", {"deterministic": True}, id="biases-deterministic"),
        pytest.param("Llama-3.1-8B", {"max_adapters": 3}, id="adapters"),
        pytest.param(
            "Qwen3-30B-A3B", {"max_adapters": 2, "deterministic": True}, id="adapters-and-experts"
        ),
    ],
)
def test_steps_are_recorded_without_the_host(
    pretence: Pretence, model: str, config: dict[str, Any]
) -> None:
    pretence.runner(model, **config)
    assert pretence.device.num_recorded > 5
    names = {"prepare_inputs_kernel", "prefill_kernel", "choose_kernel", "logprobs_kernel"}
    if "max_adapters" in config:
        names |= {"shrink_kernel", "expand_kernel"}
    assert all(pretence.kernels[name].num_launches for name in names)


@pytest.mark.parametrize("rope_type", ["dynamic", "llama3"])
def test_scaled_positions_stay_on_the_device(pretence: Pretence, rope_type: str) -> None:
    scaling = {
        "rope_type": rope_type,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    pretence.runner("Llama-3.1-8B", {"rope_scaling": scaling})
    assert pretence.device.num_recorded > 5


def requests() -> list[EngineRequest]:
    """Return one request of each kind that a step treats differently."""
    kinds: dict[str, dict[str, Any]] = {
        "greedy": {},
        "drawn": {"temperature": 0.8, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "seed": 1},
        "penalised": {"repetition_penalty": 1.2, "frequency_penalty": 0.5},
        "logprobs": {"logprobs": 3},
        "by the host": {"logit_bias": {3: 1.0}},
        "scored": {"prompt_logprobs": 2},
        "choices": {"n": 3, "temperature": 0.7, "seed": 2},
        "long": {"max_tokens": 40},
    }
    made = [
        request(name, prompt(i, 7 + 11 * i), max_tokens=params.pop("max_tokens", 6), **params)
        for i, (name, params) in enumerate(kinds.items())
    ]
    made += [
        EngineRequest(
            request_id=str(pooling),
            prompt_token_ids=tuple(prompt(50, 70)),
            sampling=SamplingParams(),
            pooling=pooling,
        )
        for pooling in (Pooling.MEAN, Pooling.LAST)
    ]
    return made


@pytest.mark.parametrize(
    "config",
    [
        pytest.param({}, id="recorded"),
        pytest.param({"cuda_graphs": False}, id="not-recorded"),
        pytest.param({"kv_cache_dtype": "fp8", "deterministic": True}, id="fp8-deterministic"),
    ],
)
def test_an_engine_serves_every_kind_of_request(pretence: Pretence, config: dict[str, Any]) -> None:
    runner = pretence.runner("Qwen3-0.6B", **config)
    engine = pretence.engine(runner, max_num_sequences=12, max_batch_tokens=64)
    for item in requests():
        engine.add(item)
    outputs = drain(engine)
    assert [output.error for output in outputs if output.error is not None] == []
    assert sum(output.finished for output in outputs) == len(requests()) + 2
    assert (pretence.device.num_replays > 0) == config.get("cuda_graphs", True)


def test_the_largest_step_is_tried_before_memory_is_given_out(pretence: Pretence) -> None:
    runner = pretence.runner(
        "Llama-3.1-8B",
        num_blocks=0,
        max_num_sequences=256,
        max_batch_tokens=8192,
        cuda_graphs=False,
    )
    block_bytes = runner.cache.blocks.nbytes // (runner.cache.num_blocks + 1)
    left = 0.9 * 140 * GIB - 20 * GIB - 2 * pretence.device.work_bytes
    assert runner.cache.num_blocks == left // block_bytes


def test_trial_runner_is_freed_before_the_next_is_made(
    pretence: Pretence, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[weakref.ref[DeviceRunner]] = []
    assemble = device_loading._assemble

    def watched(*args: Any) -> DeviceRunner:
        assert all(runner() is None for runner in made)
        runner: DeviceRunner = assemble(*args)
        made.append(weakref.ref(runner))
        return runner

    monkeypatch.setattr(device_loading, "_assemble", watched)
    gc.disable()
    try:
        pretence.runner("Qwen3-0.6B", num_blocks=0, cuda_graphs=False)
    finally:
        gc.enable()
    assert len(made) == 2


def test_references_are_not_recorded(pretence: Pretence) -> None:
    """Reference kernels read the contents that they compute with."""
    pretence.runner("Qwen3-0.6B", kernels="reference")
    assert pretence.device.num_recorded == 0


def test_blocks_are_copied_by_ids_on_the_device(pretence: Pretence) -> None:
    cache = pretence.runner("Llama-3.1-8B", cuda_graphs=False).cache
    with pretending(pretence.operations):
        ids = pretence.device.upload(np.arange(3))
        copy_blocks(cache.blocks, cache.blocks, ids, ids)
        with pytest.raises(AssertionError, match="takes argument 2 from the host"):
            copy_blocks(cache.blocks, cache.blocks, ids.cpu(), ids)


@pytest.mark.parametrize(
    "work",
    [
        pytest.param(lambda rows: rows.index_select(0, torch.tensor([1])), id="index"),
        pytest.param(lambda rows: rows + torch.tensor([1.0], device=CUDA), id="values"),
        pytest.param(lambda rows: rows.sum().item(), id="waits"),
        pytest.param(lambda rows: rows[rows > 0], id="shape-of-contents"),
        pytest.param(lambda rows: rows.cpu(), id="to-the-host"),
    ],
)
def test_the_pretence_is_seen_through(
    pretence: Pretence, work: Callable[[torch.Tensor], object]
) -> None:
    with pretending(pretence.operations):
        rows = torch.zeros(3, device=CUDA)
        with pytest.raises(AssertionError, match="recording"):
            pretence.device.record(lambda: work(rows))

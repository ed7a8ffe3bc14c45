"""Adapters on a CUDA device: its kernels, its graphs, and copies of adapters to it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from millrace.engine.devices.cuda.device import CudaDevice
from millrace.engine.step.engine import Engine
from millrace.engine.types import EngineRequest
from millrace.schemas.config import EngineConfig
from millrace.schemas.models.adapters import AdapterRef
from tests.engine.adapters.saved import engine_adapter, save_adapter, with_adapter
from tests.engine.adapters.test_against_peft import SUBSETS, check_prompt
from tests.engine.adapters.test_on_devices import mixed_requests
from tests.engine.checkpoints import save_llama
from tests.engine.devices.cuda.test_device_runner import answers
from tests.engine.kernels.gpu.test_adapters import RANKS, SUBSETS_OF_SLICES, check, drawn
from tests.engine.support import drain, prompt, request

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    path = tmp_path_factory.mktemp("base")
    # What matrix units take, and groups of quantized weights.
    shape = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64}
    return path, save_llama(path, num_attention_heads=4, **shape)


def _engine(path: Path, **config: Any) -> Engine:
    chosen: dict[str, Any] = {
        "device": "cuda",
        "dtype": "float32",
        "num_blocks": 256,
        "max_num_sequences": 16,
        "max_batch_tokens": 256,
        "max_adapters": 3,
        "max_adapter_rank": 32,
    }
    return Engine.load(path, EngineConfig(**(chosen | config)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fixed", [False, True])
def test_each_subset_of_slices(dtype: torch.dtype, fixed: bool) -> None:
    from millrace.engine.kernels.gpu.adapters import add_adapters

    torch.manual_seed(1)
    few, many = [1, -1, 2, 0, 2, -1] * 7, [0] * 300 + [-1] * 100 + [2, 1] * 150
    for product, present in SUBSETS_OF_SLICES:
        adapters = [drawn(product, [rank * one for one in present], dtype) for rank in RANKS]
        for of_rows in ([1], few, many) if all(present) else (few,):
            check(add_adapters, product, adapters, of_rows, dtype=dtype, fixed=fixed, device="cuda")


def test_each_subset_of_projections(llama: tuple[Path, Any], tmp_path: Path) -> None:
    """The engine has fewer slots than adapters."""
    path, model = llama
    engine = _engine(path)
    for number, targets in enumerate(SUBSETS):
        folder = tmp_path / f"a{number}"
        adapted = save_adapter(folder, model, number, targets, r=1 + 2 * number)
        check_prompt(engine, adapted, engine_adapter(folder))
        check_prompt(engine, model, None)


def test_a_gpu_answers_as_the_host_does(llama: tuple[Path, Any], tmp_path: Path) -> None:
    """Adapters come and go while recorded and unrecorded steps run."""
    path, model = llama
    adapters: list[AdapterRef | None] = [None]
    for number in range(4):
        save_adapter(tmp_path / f"a{number}", model, number, SUBSETS[-1 - number], r=3 + number)
        adapters.append(engine_adapter(tmp_path / f"a{number}"))
    requests = mixed_requests(adapters)
    host = Engine.load(path, EngineConfig(device="cpu", num_blocks=128, kernels="torch"))
    engine = _engine(path, max_adapters=2, num_blocks=24, max_num_sequences=6, max_batch_tokens=48)
    found, expected = answers(engine, requests), answers(host, requests)
    assert {key: _tokens(entries) for key, entries in found.items()} == {
        key: _tokens(entries) for key, entries in expected.items()
    }
    assert engine.stats().num_adapter_evictions > 0


def _tokens(entries: list[Any]) -> list[int]:
    return [entry for entry in entries if isinstance(entry, int)]


@pytest.mark.parametrize("quantization", [None, "int8", "fp8"])
def test_deterministic_answers_do_not_depend_on_others(
    llama: tuple[Path, Any], tmp_path: Path, quantization: str | None
) -> None:
    path, model = llama
    adapters: list[AdapterRef | None] = [None]
    for number, rank in enumerate((3, 17, 32)):
        save_adapter(tmp_path / f"a{number}", model, seed=number, r=rank)
        adapters.append(engine_adapter(tmp_path / f"a{number}"))
    requests = [
        with_adapter(
            adapters[i % len(adapters)],
            request(f"r{i}", prompt(i, 5 + 19 * i), max_tokens=24, logprobs=2),
        )
        for i in range(12)
    ]

    def answered(engine: Engine, several: list[EngineRequest]) -> dict[str, list[Any]]:
        for one in several:
            engine.add(one)
        found: dict[str, list[Any]] = {}
        for output in drain(engine):
            assert output.error is None, output.error
            found.setdefault(output.request_id, []).extend(output.logprobs)
        return found

    config: dict[str, Any] = {
        "dtype": "bfloat16",
        "deterministic": True,
        "prefix_cache": False,
        "quantization": quantization,
    }
    engine = _engine(path, **config)
    alone: dict[str, list[Any]] = {}
    for one in requests:
        alone |= answered(engine, [one])
    assert answered(_engine(path, **config), requests) == alone


def test_copies_beside_steps_arrive_whole() -> None:
    """Several threads copy parts that are larger and smaller than a pinned piece."""
    device = CudaDevice(torch.device("cuda"))
    sizes = (5, 6_000_001, 3, 9_000_000)
    sources = [
        [torch.randint(-(2**15), 2**15, (size,), dtype=torch.int16) for size in sizes]
        for _ in range(4)
    ]
    targets = torch.zeros(4, sum(sizes), dtype=torch.int16, device="cuda")
    steps = torch.randn(2048, 2048, device="cuda")
    threads = [
        threading.Thread(target=device.fill, args=(target, parts))
        for target, parts in zip(targets, sources, strict=True)
    ]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        steps = torch.nn.functional.normalize(steps @ steps)
    for target, parts in zip(targets, sources, strict=True):
        assert torch.equal(target.cpu(), torch.cat(parts))


def test_a_slot_is_written_after_the_steps_that_read_it() -> None:
    device = CudaDevice(torch.device("cuda"))
    slot = torch.ones(1 << 20, device="cuda")
    work = torch.randn(4096, 4096, device="cuda")
    device.fill(slot, [torch.ones(1 << 20)])
    for _ in range(50):
        work = torch.nn.functional.normalize(work @ work)
    seen = slot + 0 * work.sum()
    device.fill(slot, [torch.zeros(1 << 20)])
    assert torch.equal(seen, torch.ones_like(seen))
    assert not slot.any()

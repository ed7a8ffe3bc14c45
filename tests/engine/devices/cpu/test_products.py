"""Choice of an engine's products by the measured time of steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from millrace.engine.adapters.rows import RowAdapters
from millrace.engine.devices.cpu import products
from millrace.engine.devices.cpu.fused_decoder import FusedDecoder
from millrace.engine.devices.cpu.products import choose_product, sample_config, time_ratio
from millrace.engine.kernels.cpu import CpuKernels
from millrace.engine.models.decoder import Decoder
from millrace.engine.step.batch import FlatBatch
from millrace.registry.checkpoints.checkpoint import ModelConfig, read_model_config
from tests.engine.checkpoints import save_config
from tests.engine.devices.cpu.test_fused_decoder import LLAMA
from tests.engine.kernels.compiled import compiled

_WIDE = {
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
}


class _Clock:
    """Clock that advances only by the given times."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def steps(self, took_ms: Iterator[float]) -> Callable[[FlatBatch], None]:
        """Return a step that takes the next of these times, in ms."""

        def step(_: FlatBatch) -> None:
            self.now_s += next(took_ms) / 1000

        return step


def _config(tmp_path: Path, family: str = "Llama") -> ModelConfig:
    save_config(tmp_path, family, **LLAMA)
    return read_model_config(tmp_path)


@pytest.fixture
def kernels() -> CpuKernels:
    return compiled(torch.bfloat16)


@pytest.mark.parametrize(("own_s", "is_own"), [(0.9, True), (1.1, False)])
def test_products_are_those_whose_steps_took_less_time(
    tmp_path: Path,
    kernels: CpuKernels,
    monkeypatch: pytest.MonkeyPatch,
    own_s: float,
    is_own: bool,
) -> None:
    clock = _Clock()

    def taking(seconds: float, of: type[Decoder[Any, Any]]) -> Any:
        real = of.forward_hidden

        def forward_hidden(
            self: Any, batch: FlatBatch, hidden: torch.Tensor, adapters: RowAdapters | None
        ) -> torch.Tensor:
            clock.now_s += seconds
            return real(self, batch, hidden, adapters)

        return forward_hidden

    for seconds, of in ((1.0, Decoder), (own_s, FusedDecoder)):
        monkeypatch.setattr(of, "forward_hidden", taking(seconds, of))
    assert choose_product(kernels, _config(tmp_path), clock) is is_own


def test_kernels_without_products_are_not_asked(tmp_path: Path) -> None:
    assert not choose_product(compiled(torch.float32), _config(tmp_path))


def test_a_first_time_and_what_disturbs_some_turns_do_not_count() -> None:
    clock, batches = _Clock(), [products._batch([(0, 3)])] * 2
    own_ms = iter([9, 7, 7, 7, 2, 7] * 2)
    other_ms = iter([0.1, 5, 4, 4, 4, 4] * 2)
    steps = clock.steps(own_ms), clock.steps(other_ms)
    assert time_ratio(*steps, batches, clock) == pytest.approx(0.5)
    assert not [*own_ms, *other_ms]


def test_long_steps_are_timed_twice() -> None:
    """Long steps are timed twice after a first time that does not count."""
    clock, batches = _Clock(), [products._batch([(0, 3)])] * 2
    own_ms = iter([900, 700, 200] * 2)
    other_ms = iter([10, 400, 500] * 2)
    steps = clock.steps(own_ms), clock.steps(other_ms)
    assert time_ratio(*steps, batches, clock) == pytest.approx(0.5)
    assert not [*own_ms, *other_ms]


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Mixtral", "Qwen3Moe"])
@pytest.mark.parametrize("changes", [{}, _WIDE], ids=["small", "wide"])
def test_every_model_has_a_sample_of_two_layers(
    tmp_path: Path, kernels: CpuKernels, family: str, changes: dict[str, Any]
) -> None:
    config = msgspec.structs.replace(_config(tmp_path, family), **changes)
    sample = sample_config(config)
    assert sample.num_hidden_layers == 2
    assert sample.hidden_size == min(config.hidden_size, 1024)
    assert sample.num_attention_heads % sample.num_key_value_heads == 0
    assert (sample.experts is None) == (config.experts is None)
    if not changes:  # a wide sample takes seconds to time
        assert choose_product(kernels, config) is not None

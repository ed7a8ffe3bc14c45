"""Data type in which a CPU computes: a small checkpoint is widened where bfloat16 is not
batch-invariant."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from millrace.engine.devices.cpu.runner import ModelRunner
from millrace.engine.kernels.build import KernelBuildError
from millrace.engine.step import settings
from tests.engine.checkpoints import save_model
from tests.engine.devices.cpu.test_fused_decoder import LLAMA
from tests.engine.support import resolved


def _load(path: Path, **settings: Any) -> ModelRunner:
    return ModelRunner.load(path, resolved(path, num_blocks=8, device="cpu", **settings))


def _save(path: Path, family: str = "Llama", **changes: Any) -> Path:
    save_model(path, family, stored_dtype=torch.bfloat16, **LLAMA | changes)
    return path


def test_a_small_checkpoint_stays_in_bfloat16_where_its_rows_are_exact(tmp_path: Path) -> None:
    loaded = _load(_save(tmp_path))
    assert (loaded.cache.data.dtype, loaded.is_row_exact) == (torch.bfloat16, True)


@pytest.mark.parametrize(
    "settings",
    [{"kernels": "torch"}, {"dtype": "float32"}, {"dtype": "float32", "kernels": "native"}],
)
def test_checkpoint_is_widened_by_other_kernels_and_by_the_setting(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    loaded = _load(_save(tmp_path), **settings)
    assert (loaded.cache.data.dtype, loaded.is_row_exact) == (torch.float32, False)


def test_checkpoint_is_widened_where_no_kernels_can_be_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> Path:
        raise KernelBuildError("no compiler")

    monkeypatch.setattr(settings, "cpu_library", fails)
    loaded = _load(_save(tmp_path))
    assert (loaded.cache.data.dtype, loaded.is_row_exact) == (torch.float32, False)


def test_experts_and_what_is_stored_in_float32_are_not_in_bfloat16(tmp_path: Path) -> None:
    mixture = _save(tmp_path / "mixture", "Mixtral", num_local_experts=3)
    wide = tmp_path / "wide"
    save_model(wide, "Llama", **LLAMA)
    for path in (mixture, wide):
        assert _load(path).cache.data.dtype is torch.float32

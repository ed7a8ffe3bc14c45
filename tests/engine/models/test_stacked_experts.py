"""Experts that are loaded into a stack, against the same checkpoint's one after the other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)

from millrace.engine.kernels.gpu.reference import experts as reference_experts
from millrace.engine.models.linears import Projection
from millrace.engine.models.loader import load_weights
from millrace.engine.models.mlp import MixtureOfExperts, plus_mlp
from millrace.engine.models.stacked_experts import StackedExperts, stacked_experts
from millrace.registry.checkpoints.checkpoint import read_model_config
from tests.engine.checkpoints import save_model

CPU = torch.device("cpu")


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)


@pytest.mark.parametrize("family", ["Mixtral", "Qwen3Moe"])
def test_a_checkpoint_loaded_into_stacks_computes_the_same(tmp_path: Path, family: str) -> None:
    save_model(tmp_path, family)
    config = read_model_config(tmp_path)
    make = stacked_experts(reference_experts, Projection, fixed=False)
    one_by_one = load_weights(tmp_path, config, dtype=torch.float32, device=CPU)
    stacked = load_weights(tmp_path, config, dtype=torch.float32, device=CPU, experts=make)
    rows = torch.randn(7, config.hidden_size, generator=torch.Generator().manual_seed(0))
    for left, right in zip(one_by_one.layers, stacked.layers, strict=True):
        assert isinstance(left.mlp, MixtureOfExperts)
        assert isinstance(right.mlp, StackedExperts)
        torch.testing.assert_close(
            plus_mlp(rows.clone(), rows, right.mlp, swiglu),
            plus_mlp(rows.clone(), rows, left.mlp, swiglu),
        )

"""Batch invariance of the compiled kernels, for rows with and without an adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from millrace.engine.step.engine import Engine
from millrace.engine.types import EngineRequest
from millrace.schemas.config import EngineConfig
from millrace.schemas.models.adapters import AdapterRef
from tests.engine.adapters.saved import (
    ALL_TARGETS,
    engine_adapter,
    save_adapter,
    with_adapter,
)
from tests.engine.checkpoints import save_llama
from tests.engine.kernels.compiled import compiled
from tests.engine.support import drain, prompt, request

_SHAPE = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32, "num_attention_heads": 4}
# Of one adapter together, on panels of their own, and beside projections that have none.
_TARGETS = (ALL_TARGETS, ("q_proj", "v_proj"), ("k_proj", "o_proj", "up_proj"), ("down_proj",))
_NUM_TOKENS = 20


def _answers(engine: Engine, requests: list[EngineRequest]) -> dict[str, tuple[Any, ...]]:
    """Return tokens and log-probabilities of each request."""
    for one in requests:
        engine.add(one)
    found: dict[str, list[Any]] = {}
    for output in drain(engine):
        assert output.error is None, output.error
        found.setdefault(output.request_id, []).extend([*output.logprobs, *output.prompt_logprobs])
    return {name: tuple(entries) for name, entries in found.items()}


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_alone_and_together(tmp_path: Path, quantization: str | None) -> None:
    compiled(torch.bfloat16)  # without a compiler there is nothing to look at
    model = save_llama(tmp_path / "base", **_SHAPE)
    adapters: list[AdapterRef | None] = [None]
    for number, targets in enumerate(_TARGETS):
        folder = tmp_path / f"a{number}"
        save_adapter(folder, model, seed=number, targets=targets, r=3 + 5 * number, lora_alpha=8)
        adapters.append(engine_adapter(folder))
    config = EngineConfig(
        num_blocks=256, device="cpu", dtype="bfloat16", quantization=quantization, kernels="native"
    )
    requests = [
        with_adapter(
            adapter,
            request(
                f"r{i}",
                prompt(i, 5 + 9 * i),
                max_tokens=_NUM_TOKENS,
                logprobs=2,
                prompt_logprobs=0,
            ),
        )
        for i, adapter in enumerate([*adapters, *adapters])
    ]
    engine = Engine.load(tmp_path / "base", config)
    alone: dict[str, tuple[Any, ...]] = {}
    for one in requests:
        alone |= _answers(engine, [one])
    together = _answers(Engine.load(tmp_path / "base", config), requests)
    assert together == alone
    assert len(set(alone.values())) == len(requests)

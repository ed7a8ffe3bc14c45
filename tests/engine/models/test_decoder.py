"""The decoder against transformers, on random checkpoints of each architecture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from millrace.engine.devices.cpu.runner import ModelRunner
from millrace.engine.scheduling.schedule import ScheduledSequence
from millrace.engine.step.engine import Engine
from millrace.engine.step.sequence import Sequence
from millrace.engine.step.settings import resolve
from millrace.schemas.config import EngineConfig
from tests.engine.checkpoints import (
    reference_greedy,
    reference_logits,
    save_llama,
    save_model,
)
from tests.engine.support import drain, prompt, request, tokens_by_request

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}

CASES: list[Any] = [
    pytest.param("Llama", {}, id="llama"),
    pytest.param("Llama", {"tie_word_embeddings": True}, id="llama-tied"),
    pytest.param("Llama", {"attention_bias": True, "mlp_bias": True}, id="llama-biases"),
    pytest.param("Llama", {"rope_parameters": LLAMA3_ROPE}, id="llama3-rope"),
    pytest.param("Llama", {"rope_parameters": LINEAR_ROPE}, id="llama-linear-rope"),
    pytest.param("Llama", {"num_key_value_heads": 6}, id="llama-multi-head"),
    pytest.param("Llama", {"num_key_value_heads": 1}, id="llama-multi-query"),
    pytest.param("Llama", {"max_shard_size": "50KB"}, id="llama-sharded"),
    pytest.param("Qwen3", {}, id="qwen3"),
    pytest.param("Qwen3", {"tie_word_embeddings": True, "head_dim": 8}, id="qwen3-tied"),
    pytest.param("Qwen3", {"attention_bias": True}, id="qwen3-biases"),
    pytest.param(
        "Qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 20,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        id="qwen3-windows",
    ),
    pytest.param("Qwen2", {}, id="qwen2"),
    pytest.param(
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 33, "max_window_layers": 1},
        id="qwen2-windows",
    ),
    pytest.param("Mistral", {"sliding_window": None}, id="mistral"),
    pytest.param("Mistral", {"sliding_window": 7}, id="mistral-window-in-a-block"),
    pytest.param("Mistral", {"sliding_window": 16}, id="mistral-window-of-a-block"),
    pytest.param("Mistral", {"sliding_window": 50}, id="mistral-window-over-chunks"),
]

PROMPTS = [prompt(seed, length) for seed, length in ((1, 100), (2, 1), (3, 33))]
CHUNKS = [40, 1, 59]


def logits_of(runner: ModelRunner, chunks: list[int]) -> list[torch.Tensor]:
    """Return the last logits of each prompt, run side by side, the first of them in chunks."""
    sequences: list[Sequence] = []
    taken = 0
    for i, token_ids in enumerate(PROMPTS):
        sequence = Sequence(
            request(str(i), token_ids), arrival=i, key=0, max_total_tokens=len(token_ids) + 1
        )
        count = -(-len(token_ids) // 16)
        # Out of order, as in a pool that has been used for a while.
        sequence.block_table = list(range(taken + count - 1, taken - 1, -1))
        taken += count
        sequences.append(sequence)
    logits = {}
    for step, num_tokens in enumerate(chunks):
        plan = [ScheduledSequence(sequences[0], num_tokens)]
        if step < 2:
            other = sequences[step + 1]
            plan.append(ScheduledSequence(other, other.num_tokens))
        result = runner.launch(plan)
        for sequence, row in zip(result.by_host, result.logits, strict=True):
            logits[sequence.request_id] = row
        sequences[0].num_computed_tokens += num_tokens
    return [logits[str(i)] for i in range(len(PROMPTS))]


def check_greedy(engine: Engine, model: Any, num_tokens: int) -> None:
    """Assert that the greedy tokens of each prompt are those of a transformers' model."""
    for i, token_ids in enumerate(PROMPTS):
        engine.add(request(str(i), token_ids, max_tokens=num_tokens))
    tokens = tokens_by_request(drain(engine))
    for i, token_ids in enumerate(PROMPTS):
        assert tokens[str(i)] == reference_greedy(model, token_ids, num_tokens)


@pytest.mark.parametrize(("family", "changes"), CASES)
def test_logits_and_greedy_tokens_are_those_of_transformers(
    tmp_path: Path, family: str, changes: dict[str, Any]
) -> None:
    model = save_model(tmp_path, family, **changes)
    config = EngineConfig(num_blocks=32, dtype="float32", device="cpu")
    for ours, token_ids in zip(
        logits_of(ModelRunner.load(tmp_path, resolve(tmp_path, config)), CHUNKS),
        PROMPTS,
        strict=True,
    ):
        theirs = reference_logits(model, token_ids)[-1]
        assert float((ours - theirs).abs().max() / theirs.abs().max()) <= 1e-4
    check_greedy(Engine.load(tmp_path, config), model, 16)


def test_bfloat16_stays_near_float32(tmp_path: Path) -> None:
    model = save_llama(tmp_path)
    config = EngineConfig(num_blocks=32, dtype="bfloat16", device="cpu")
    runner = ModelRunner.load(tmp_path, resolve(tmp_path, config))
    assert runner.cache.data.dtype is torch.bfloat16
    for ours, token_ids in zip(logits_of(runner, CHUNKS), PROMPTS, strict=True):
        assert mean_error(ours, reference_logits(model, token_ids)[-1]) <= 0.05


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("Qwen2", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}),
        ("Qwen3", {"tie_word_embeddings": True}),
        ("Mixtral", {"num_local_experts": 2, "num_experts_per_tok": 2}),
    ],
)
def test_half_precision_is_no_coarser_than_that_of_transformers(
    tmp_path: Path, family: str, changes: dict[str, Any], dtype: torch.dtype
) -> None:
    model = save_model(tmp_path, family, stored_dtype=dtype, **changes)
    halved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    config = EngineConfig(num_blocks=32, dtype=str(dtype).removeprefix("torch."), device="cpu")
    runner = ModelRunner.load(tmp_path, resolve(tmp_path, config))
    assert runner.cache.data.dtype is dtype
    for ours, token_ids in zip(logits_of(runner, CHUNKS), PROMPTS, strict=True):
        exact = reference_logits(model, token_ids)[-1]
        theirs = reference_logits(halved, token_ids)[-1]
        assert mean_error(ours, exact) <= 1.5 * mean_error(theirs, exact)


def mean_error(logits: torch.Tensor, exact: torch.Tensor) -> float:
    return float((logits.float() - exact).abs().mean() / exact.abs().mean())

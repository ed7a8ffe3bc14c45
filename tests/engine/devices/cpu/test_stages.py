"""The stages of a model by compiled kernels, each of which computes its step in one call."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from millrace.engine.adapters.rows import RowAdapters
from millrace.engine.adapters.weights import read_adapter_weights
from millrace.engine.devices.cpu.fused_decoder import FusedDecoder
from millrace.engine.devices.cpu.loading import AnyDecoder, Arithmetic, load_decoder
from millrace.engine.kv.cache import KVCache
from millrace.engine.step.batch import FlatBatch
from millrace.registry.checkpoints.adapters.outline import read_adapter_outline
from millrace.registry.checkpoints.checkpoint import read_model_config
from millrace.registry.checkpoints.shard import Shard, shard_config
from tests.engine.adapters.saved import save_adapter
from tests.engine.checkpoints import save_base_model, save_model
from tests.engine.devices.cpu.test_fused_decoder import LLAMA
from tests.engine.devices.cpu.test_operations import BLOCK_SIZE, ragged_batch
from tests.engine.kernels.compiled import compiled
from tests.engine.support import resolved

CPU = torch.device("cpu")
NUM_BLOCKS = 20
SIZES = LLAMA | {"num_hidden_layers": 4}


def stages_of(path: Path, num_stages: int) -> list[tuple[AnyDecoder, Shard, bool]]:
    """Load each stage with a fresh KV cache of its own; return decoder, shard and whether rows are
    exact."""
    compiled(torch.bfloat16)
    config = read_model_config(path)
    engine = resolved(path, device="cpu", dtype="bfloat16", kernels="native")
    arithmetic = Arithmetic.chosen(config, engine)
    stages = []
    for stage in range(num_stages):
        shard = Shard(stage=stage, num_stages=num_stages)
        cache = KVCache(
            shard_config(config, shard),
            num_blocks=NUM_BLOCKS,
            block_size_tokens=BLOCK_SIZE,
            dtype=arithmetic.dtype,
            device=CPU,
        )
        cache.data.zero_()
        decoder, is_exact = load_decoder(path, config, engine, arithmetic, cache, shard)
        stages.append((decoder, shard, is_exact))
    return stages


def batch() -> FlatBatch:
    """Return a batch of a token after ten uncached ones, and of two prompts."""
    made = ragged_batch([(10, 1), (0, 30), (0, 7)], NUM_BLOCKS, random.Random(3))
    return made._replace(token_ids=torch.arange(5, 5 + len(made.positions)))


def hidden_of(path: Path, num_stages: int, adapter: Path | None = None) -> torch.Tensor:
    """Return the hidden states of the last stage, with the adapter on every other row."""
    config, step = read_model_config(path), batch()
    hidden = torch.empty(0)
    with torch.inference_mode():
        for decoder, shard, _ in stages_of(path, num_stages):
            rows = None
            if adapter is not None:
                outline = read_adapter_outline(adapter, config)
                layers = read_adapter_weights(outline, config, decoder.dtype, shard)
                of_rows = torch.arange(len(step.token_ids), dtype=torch.int32) % 2 - 1
                rows = RowAdapters([decoder.adapter(layers)], of_rows)
            if shard.is_first:
                hidden = decoder.forward(step, rows)
            else:
                hidden = decoder.forward_hidden(step, hidden, rows)
    return hidden


@pytest.mark.parametrize("num_stages", [2, 3])
@pytest.mark.parametrize("has_adapter", [False, True])
def test_stages_make_the_bits_of_the_whole(
    tmp_path: Path, num_stages: int, has_adapter: bool
) -> None:
    model = save_model(tmp_path / "base", "Qwen3", **SIZES)
    save_adapter(tmp_path / "one", model)
    adapter = tmp_path / "one" if has_adapter else None
    whole = hidden_of(tmp_path / "base", 1, adapter)
    assert whole.isfinite().all()
    assert torch.equal(hidden_of(tmp_path / "base", num_stages, adapter), whole)


def test_windows_are_those_of_the_layers(tmp_path: Path) -> None:
    kinds = ["full_attention", "sliding_attention", "full_attention", "sliding_attention"]
    windows = {"use_sliding_window": True, "sliding_window": 5, "layer_types": kinds}
    save_model(tmp_path, "Qwen3", **(SIZES | windows))
    assert torch.equal(hidden_of(tmp_path, 3), hidden_of(tmp_path, 1))


def test_rows_are_exact_by_what_a_stage_computes(tmp_path: Path) -> None:
    save_model(tmp_path / "language", "Qwen3", **SIZES)
    for num_stages in (1, 3):
        stages = stages_of(tmp_path / "language", num_stages)
        assert all(isinstance(decoder, FusedDecoder) for decoder, _, _ in stages)
        assert [is_exact for _, _, is_exact in stages] == [True] * num_stages
    # Of what there are no logits of, these are not said to be exact.
    save_base_model(tmp_path / "embeddings", "Qwen3", **SIZES)
    assert [is_exact for _, _, is_exact in stages_of(tmp_path / "embeddings", 1)] == [False]
    exact = [is_exact for _, _, is_exact in stages_of(tmp_path / "embeddings", 2)]
    assert exact == [True, False]

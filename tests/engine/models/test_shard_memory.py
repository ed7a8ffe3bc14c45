"""Memory of a rank: its share of the model, and copies of that share alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from millrace.engine.models.decoder import DecoderWeights
from millrace.engine.models.linears import PackedProjection, packed_quantized
from millrace.engine.quantization.rounding import quantize_at_load
from millrace.registry.checkpoints.checkpoint import read_model_config
from millrace.registry.checkpoints.shard import Shard, layer_weights, stage_layers, vocabulary_range
from tests.engine.checkpoints import save_model
from tests.engine.kernels.compiled import compiled
from tests.engine.models.ranks import ThreadCollectives, on_ranks, weights_of
from tests.engine.quantization.test_formats import awq_fields, gptq_fields
from tests.engine.quantization.written import awq, gptq, rewrite

SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "vocab_size": 2000,
}
EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 256}
MODULES = r"self_attn|mlp\."
# Norms, routers and the scales of sliced inputs are on every rank, and the ranks before the last
# have some more tokens of the vocabulary.
OVERHEAD = 1.15


def kept_bytes(weights: DecoderWeights) -> int:
    """Return the bytes of all memory that is kept alive, also by views of it."""
    sizes: dict[int, int] = {}

    def visit(part: Any) -> None:
        if isinstance(part, torch.Tensor):
            storage = part.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
        elif isinstance(part, (tuple, list)):
            for one in part:
                visit(one)
        elif hasattr(part, "__dict__") and not isinstance(part, ThreadCollectives):
            for one in vars(part).values():
                visit(one)

    visit(weights)
    return sum(sizes.values())


def check_share(path: Path, size: int, *, splits_experts: bool = False, **makers: Any) -> None:
    def of_rank(group: ThreadCollectives) -> int:
        shard = Shard(group.rank, size, splits_experts)
        return kept_bytes(weights_of(path, shard, group, **makers))

    whole = kept_bytes(weights_of(path, Shard(), None, **makers))
    kept = on_ranks(size, of_rank)
    assert max(kept) <= OVERHEAD * whole / size
    assert sum(kept) >= whole


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("is_tied", [False, True])
def test_wide_weights(tmp_path: Path, size: int, is_tied: bool) -> None:
    save_model(tmp_path, "Llama", tie_word_embeddings=is_tied, attention_bias=True, **SIZES)
    check_share(tmp_path, size)


@pytest.mark.parametrize("splits_experts", [False, True], ids=["slices", "whole-experts"])
def test_experts(tmp_path: Path, splits_experts: bool) -> None:
    save_model(tmp_path, "Mixtral", **(SIZES | EXPERTS))
    check_share(tmp_path, 4, splits_experts=splits_experts)


def by_kernels() -> dict[str, Any]:
    kernels = compiled(torch.bfloat16)
    return {
        "dtype": torch.bfloat16,
        "product": partial(PackedProjection.of_wide, kernels),
        "quantized": partial(packed_quantized, kernels),
    }


@pytest.mark.parametrize(
    ("write", "fields"),
    [
        pytest.param(lambda: gptq(4, 128), gptq_fields(4, 128), id="gptq"),
        pytest.param(lambda: gptq(8, -1), gptq_fields(8, -1), id="gptq-int8"),
        pytest.param(lambda: awq(64), awq_fields(64), id="awq"),
    ],
)
def test_quantized_weights(
    tmp_path: Path, write: Callable[[], Any], fields: dict[str, Any]
) -> None:
    save_model(tmp_path, "Llama", **SIZES)
    rewrite(tmp_path, {MODULES: write()}, fields)
    check_share(tmp_path, 4, **by_kernels())


@pytest.mark.parametrize("quantization", ["int4", "int8"])
def test_weights_quantized_at_load(tmp_path: Path, quantization: str) -> None:
    save_model(tmp_path, "Llama", **SIZES)
    at_load = quantize_at_load(quantization)
    makers = by_kernels() | {"quantize": at_load.layers, "quantize_head": at_load.head}
    check_share(tmp_path, 4, **makers)


def test_a_tied_head_is_the_embedding_itself(tmp_path: Path) -> None:
    save_model(tmp_path, "Llama", tie_word_embeddings=True, **SIZES)
    whole = weights_of(tmp_path, Shard(), None)
    for weights in on_ranks(2, lambda group: weights_of(tmp_path, Shard(group.rank, 2), group)):
        assert weights.head is not None
        assert weights.embedding.data_ptr() == weights.head._weight.data_ptr()  # type: ignore[attr-defined]
        assert len(weights.embedding) in (1008, 992)
    own = vocabulary_range(SIZES["vocab_size"], Shard(1, 2))
    assert torch.equal(weights.embedding, whole.embedding[own.start : own.stop])


@pytest.mark.parametrize(("size", "num_stages"), [(1, 2), (1, 3), (2, 2)])
@pytest.mark.parametrize("is_tied", [False, True])
def test_stages(tmp_path: Path, is_tied: bool, size: int, num_stages: int) -> None:
    """A stage has its layers, the first the embeddings and the last the head, and nothing else."""
    sizes = SIZES | {"num_hidden_layers": 5}
    save_model(tmp_path, "Llama", tie_word_embeddings=is_tied, attention_bias=True, **sizes)
    check_stages(tmp_path, size, num_stages)


def test_stages_of_a_mixture(tmp_path: Path) -> None:
    mixtures = {"decoder_sparse_step": 2, "moe_intermediate_size": 256, "num_experts": 8}
    save_model(tmp_path, "Qwen3Moe", **(SIZES | {"num_hidden_layers": 6} | mixtures))
    check_stages(tmp_path, 1, 3)


def check_stages(path: Path, size: int, num_stages: int) -> None:
    config = read_model_config(path)
    vocabulary = config.vocab_size * config.hidden_size
    for stage in range(num_stages):
        shards = [Shard(rank, size, False, stage, num_stages) for rank in range(size)]

        def of_rank(group: ThreadCollectives, shards: list[Shard] = shards) -> int:
            return kept_bytes(weights_of(path, shards[group.rank], group))

        own = stage_layers(config, shards[0])
        num_weights = sum(layer_weights(config)[own.start : own.stop])
        num_weights += vocabulary * (shards[0].is_first + shards[0].is_last)
        kept = on_ranks(size, of_rank)
        assert sum(kept) >= num_weights * torch.float32.itemsize
        assert max(kept) <= OVERHEAD * num_weights * torch.float32.itemsize / size

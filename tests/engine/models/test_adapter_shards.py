"""Adapters over several ranks: each rank has the slices that fit its slices of the model."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from millrace.engine.adapters.packed import PackedAdapter
from millrace.engine.adapters.rows import AdapterWeights, PlainAdapter, RowAdapters
from millrace.engine.adapters.slots import Product
from millrace.engine.adapters.weights import LayerSlices, read_adapter_weights
from millrace.engine.devices.cpu.attention import TorchAttention
from millrace.engine.devices.cpu.fused_decoder import FusedDecoder
from millrace.engine.devices.cpu.operations import CpuOperations
from millrace.engine.kv.cache import KVCache
from millrace.engine.models.adapted_linear import AddAdapters, adapted_weights
from millrace.engine.models.decoder import Decoder, DecoderWeights
from millrace.engine.models.linears import PackedProjection, ReducedLinear
from millrace.engine.models.mlp import GatedMLP
from millrace.registry.checkpoints.adapters.outline import read_adapter_outline
from millrace.registry.checkpoints.checkpoint import ModelConfig, read_model_config
from millrace.registry.checkpoints.shard import Shard, shard_config
from tests.engine.adapters.saved import ALL_TARGETS, save_adapter
from tests.engine.adapters.test_against_peft import SUBSETS
from tests.engine.checkpoints import save_model
from tests.engine.devices.cpu.test_operations import BLOCK_SIZE, ragged_batch
from tests.engine.kernels.compiled import compiled
from tests.engine.models.ranks import CPU, ThreadCollectives, logits_of, on_ranks, weights_of
from tests.engine.models.test_shards import EXPERTS, RANKS, SIZES, same_logits

ReadAdapter = Callable[[Shard], list[LayerSlices]]


def reader(
    base: Path, folder: Path, dtype: torch.dtype = torch.float32
) -> Callable[[Shard], list[LayerSlices]]:
    config = read_model_config(base)
    outline = read_adapter_outline(folder, config)
    return lambda shard: read_adapter_weights(outline, config, dtype, shard)


def plain(read: ReadAdapter) -> Callable[[Shard], AdapterWeights]:
    return lambda shard: PlainAdapter(read(shard))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    path = tmp_path_factory.mktemp("base")
    return path, save_model(path, "Llama", **(SIZES | {"num_key_value_heads": 2}))


@RANKS
@pytest.mark.parametrize("targets", SUBSETS, ids=" ".join)
def test_each_subset_of_projections(
    base: tuple[Path, Any], tmp_path: Path, targets: tuple[str, ...], size: int
) -> None:
    path, model = base
    save_adapter(tmp_path, model, targets=targets)
    adapters = plain(reader(path, tmp_path))
    whole = logits_of(path, adapters=adapters)
    same_logits(logits_of(path, size=size, adapters=adapters), whole)
    without = logits_of(path)
    # Every other row has it.
    assert float((whole - without).abs().max()) > 0.1
    torch.testing.assert_close(whole[0], without[0])


@RANKS
def test_attention_beside_experts(tmp_path: Path, size: int) -> None:
    path = tmp_path / "base"
    model = save_model(path, "Qwen3Moe", **(SIZES | EXPERTS))
    save_adapter(tmp_path / "one", model, targets=ALL_TARGETS[:4])
    adapters = plain(reader(path, tmp_path / "one"))
    whole = logits_of(path, adapters=adapters)
    for splits_experts in (False, True):
        ours = logits_of(path, size=size, adapters=adapters, splits_experts=splits_experts)
        same_logits(ours, whole)


@RANKS
def test_products_that_have_adapters_added_to_them(
    base: tuple[Path, Any], tmp_path: Path, size: int
) -> None:
    """The products add adapters themselves, as those of a device do."""
    path, model = base
    save_adapter(tmp_path, model)
    read = reader(path, tmp_path)

    def change(weights: DecoderWeights, shard: Shard) -> DecoderWeights:
        layers = read(shard)

        def adder(layer: int, product: Product) -> AddAdapters:
            def add(rows: torch.Tensor, out: torch.Tensor) -> None:
                matrices = [one for one in layers[layer][product] if one is not None]
                out += torch.cat([rows @ one.a.t() @ one.b.t() for one in matrices], -1)

            return add

        return adapted_weights(weights, adder)

    whole = logits_of(path, change=change)
    same_logits(logits_of(path, size=size, change=change), whole)
    assert float((whole - logits_of(path)).abs().max()) > 0.1


@RANKS
def test_ranks_have_slices_of_the_matrices(
    base: tuple[Path, Any], tmp_path: Path, size: int
) -> None:
    path, model = base
    save_adapter(tmp_path, model)
    read = reader(path, tmp_path)
    whole = read(Shard())[1]
    ranks = [read(Shard(rank, size))[1] for rank in range(size)]
    for product in ("output", "down"):
        parts = [getattr(own, product)[0] for own in ranks]
        assert torch.equal(torch.cat([part.a for part in parts], 1), getattr(whole, product)[0].a)
        assert all(torch.equal(part.b, getattr(whole, product)[0].b) for part in parts)
    for matrix in (0, 1):
        parts = [own.gate_up[matrix] for own in ranks]
        assert torch.equal(
            torch.cat([part.b for part in parts if part is not None]),
            whole.gate_up[matrix].b,  # type: ignore[union-attr]
        )


def test_the_compiled_step_takes_slices_of_an_adapter(tmp_path: Path) -> None:
    """The step of a rank's layers, without sums over ranks, equals the decoder of single calls."""
    kernels = compiled(torch.bfloat16)
    model = save_model(tmp_path / "base", "Llama", **(SIZES | {"head_dim": 32}))
    save_adapter(tmp_path / "one", model)
    shard = Shard(1, 2)

    def product(weight: torch.Tensor, bias: torch.Tensor | None) -> PackedProjection:
        return PackedProjection.of_wide(kernels, weight, bias)

    def load(group: ThreadCollectives) -> DecoderWeights:
        own = Shard(group.rank, 2)
        return weights_of(tmp_path / "base", own, group, dtype=torch.bfloat16, product=product)

    weights = unreduced(on_ranks(2, load)[shard.rank])
    config = shard_config(read_model_config(tmp_path / "base"), shard)
    layers = reader(tmp_path / "base", tmp_path / "one", torch.bfloat16)(shard)
    batch = ragged_batch([(0, 1), (0, 30), (0, 7)], 20, random.Random(3))
    of_rows = torch.arange(len(batch.token_ids), dtype=torch.int32) % 2 - 1

    fused = FusedDecoder(config, weights, operations_of(config, kernels), kernels)
    apart = Decoder(config, weights, operations_of(config, kernels))
    with torch.inference_mode():
        ours = fused.forward(batch, RowAdapters([PackedAdapter(layers)], of_rows))
        theirs = apart.forward(batch, RowAdapters([PlainAdapter(layers)], of_rows))
        without = apart.forward(batch)
    assert float((ours - theirs).norm()) <= 0.02 * float(theirs.norm())
    assert float((without - theirs).norm()) >= 0.1 * float(theirs.norm())


def unreduced(weights: DecoderWeights) -> DecoderWeights:
    layers = []
    for layer in weights.layers:
        mlp = layer.mlp
        assert isinstance(mlp, GatedMLP)
        assert isinstance(mlp.down, ReducedLinear)
        assert isinstance(layer.output, ReducedLinear)
        own = GatedMLP(mlp.gate_up, mlp.down.linear)
        layers.append(layer._replace(output=layer.output.linear, mlp=own))
    return weights._replace(layers=tuple(layers))


def operations_of(config: ModelConfig, kernels: Any) -> CpuOperations:
    cache = KVCache(
        config, num_blocks=20, block_size_tokens=BLOCK_SIZE, dtype=torch.bfloat16, device=CPU
    )
    attention = TorchAttention(
        cache, num_heads=config.num_attention_heads, dtype=torch.bfloat16, windows=config.windows
    )
    return CpuOperations(attention, kernels, epsilon=config.rms_norm_eps)

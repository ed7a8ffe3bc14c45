"""Fused step of one call, compared with the decoder of one call per operation."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from millrace.engine.devices.cpu.attention import TorchAttention
from millrace.engine.devices.cpu.fused_decoder import FusedDecoder, packed_layers
from millrace.engine.devices.cpu.operations import CpuMetadata, CpuOperations
from millrace.engine.kernels.cpu import CpuKernels
from millrace.engine.kv.cache import KVCache
from millrace.engine.models.decoder import Decoder, DecoderWeights
from millrace.engine.models.linears import PackedProjection, Projection, packed_quantized
from millrace.engine.models.loader import load_weights
from millrace.engine.quantization.rounding import quantize_at_load
from millrace.engine.step.batch import FlatBatch
from millrace.engine.step.engine import Engine
from millrace.registry.checkpoints.checkpoint import ModelConfig, read_model_config
from millrace.schemas.config import EngineConfig
from millrace.schemas.engines import QUANTIZATIONS
from tests.engine.checkpoints import save_model
from tests.engine.devices.cpu.test_operations import BLOCK_SIZE, ragged_batch
from tests.engine.kernels.compiled import compiled
from tests.engine.support import drain, prompt, request, tokens_by_request

NUM_BLOCKS = 80
LLAMA: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_hidden_layers": 3,
    "vocab_size": 90,
    "max_position_embeddings": 2048,
}
_SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "grouped": ("Llama", {}),
    "biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "head norms": ("Qwen3", {"head_dim": 64, "num_key_value_heads": 4}),
    "a wide head": ("Qwen3", {"head_dim": 256, "num_attention_heads": 3, "num_key_value_heads": 1}),
    "windows": ("Mistral", {"sliding_window": 37}),
}
# Context and new tokens of each sequence.
_BATCHES = {
    "one token": [(20, 1)],
    "single tokens": [(0, 1), (3, 1), (40, 1), (400, 1), (16, 1)],
    "one prompt": [(0, 50)],
    "a prompt of several sections": [(0, 530)],
    "a chunk behind others": [(300, 40), (256, 13), (255, 2)],
    "both": [(9, 1), (0, 70), (130, 1), (5, 25), (290, 12)],
}


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def kernels() -> CpuKernels:
    return compiled(torch.bfloat16)


@pytest.fixture(scope="module", params=_SHAPES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, changes = _SHAPES[request.param]
    folder = tmp_path_factory.mktemp("checkpoint")
    save_model(folder, family, **LLAMA | changes)
    return folder


class _Side:
    """Decoder of a checkpoint with a KV cache of its own."""

    def __init__(
        self,
        checkpoint: Path,
        kernels: CpuKernels,
        contents: torch.Tensor,
        *,
        packed: bool,
        quantization: str | None = None,
    ) -> None:
        self.config = read_model_config(checkpoint)
        cache = _cache(self.config)
        cache.data.copy_(contents)
        self.cache = cache.data
        attention = TorchAttention(
            cache,
            num_heads=self.config.num_attention_heads,
            dtype=torch.bfloat16,
            windows=self.config.windows,
        )
        self.operations = CpuOperations(attention, kernels, epsilon=self.config.rms_norm_eps)
        self.weights: DecoderWeights = load_weights(
            checkpoint,
            self.config,
            dtype=torch.bfloat16,
            device=torch.device("cpu"),
            product=partial(PackedProjection.of_wide, kernels) if packed else Projection,
            quantized=partial(packed_quantized, kernels) if packed else None,
            quantize=quantize_at_load(quantization).layers,
        )

    def plain(self) -> Decoder[FlatBatch, CpuMetadata]:
        return Decoder(self.config, self.weights, self.operations)


def _cache(config: ModelConfig) -> KVCache:
    return KVCache(
        config,
        num_blocks=NUM_BLOCKS,
        block_size_tokens=BLOCK_SIZE,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )


def _batch(lengths: list[tuple[int, int]]) -> FlatBatch:
    batch = ragged_batch(lengths, NUM_BLOCKS, random.Random(3))
    torch.manual_seed(4)
    return batch._replace(token_ids=torch.randint(5, 85, (len(batch.positions),)))


def _differ(result: torch.Tensor, expected: torch.Tensor) -> float:
    return float((result.float() - expected.float()).norm() / expected.float().norm())


@pytest.mark.parametrize("name", _BATCHES)
def test_a_step_is_that_of_the_decoder(checkpoint: Path, kernels: CpuKernels, name: str) -> None:
    torch.manual_seed(1)
    contents = torch.randn(_cache(read_model_config(checkpoint)).data.shape).bfloat16()
    fused, plain = (_Side(checkpoint, kernels, contents, packed=p) for p in (True, False))
    decoder = FusedDecoder(fused.config, fused.weights, fused.operations, kernels)
    batch = _batch(_BATCHES[name])
    assert _differ(decoder.forward(batch), plain.plain().forward(batch)) < 0.02
    assert _differ(fused.cache, plain.cache) < 0.01


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("name", _BATCHES)
def test_features_are_what_comes_into_layers_and_change_no_bit(
    checkpoint: Path, kernels: CpuKernels, name: str, quantization: str | None
) -> None:
    torch.manual_seed(1)
    contents = torch.randn(_cache(read_model_config(checkpoint)).data.shape).bfloat16()
    side = _Side(checkpoint, kernels, contents, packed=True, quantization=quantization)
    batch = _batch(_BATCHES[name])

    def decoder(num_layers: int) -> FusedDecoder:
        side.cache.copy_(contents)
        weights = side.weights._replace(layers=side.weights.layers[:num_layers])
        return FusedDecoder(side.config, weights, side.operations, kernels)

    hidden = decoder(3).forward(batch)
    same, features = decoder(3).forward_with_features(batch, None, (2, 0, 3, 1))
    assert torch.equal(same, hidden)
    for feature, layer in zip(features.chunk(4, 1), (2, 0, 3, 1), strict=True):
        expected = side.weights.embedding[batch.token_ids]
        if layer:
            expected = decoder(layer).forward(batch)
        assert torch.equal(feature, expected.bfloat16())


@pytest.mark.parametrize("name", ["single tokens", "both"])
def test_a_step_of_quantized_weights_is_that_of_the_decoder(
    checkpoint: Path, kernels: CpuKernels, name: str
) -> None:
    """The weights are int4, whose rows stay wide. A rounded row with another last bit may get
    another code, which says nothing of the step."""
    quantization = "int4"
    torch.manual_seed(1)
    contents = torch.randn(_cache(read_model_config(checkpoint)).data.shape).bfloat16()
    fused, plain = (
        _Side(checkpoint, kernels, contents, packed=p, quantization=quantization)
        for p in (True, False)
    )
    decoder = FusedDecoder(fused.config, fused.weights, fused.operations, kernels)
    batch = _batch(_BATCHES[name])
    assert _differ(decoder.forward(batch), plain.plain().forward(batch)) < 0.03


@pytest.mark.parametrize("quantization", [None, *QUANTIZATIONS])
@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_single_tokens_are_the_same_bit_for_bit(
    checkpoint: Path, kernels: CpuKernels, num_threads: int, quantization: str | None
) -> None:
    torch.manual_seed(1)
    contents = torch.randn(_cache(read_model_config(checkpoint)).data.shape).bfloat16()
    fused, apart = (
        _Side(checkpoint, kernels, contents, packed=True, quantization=quantization)
        for _ in range(2)
    )
    decoder = FusedDecoder(fused.config, fused.weights, fused.operations, kernels)
    batch = _batch(_BATCHES["single tokens"])
    expected = apart.plain().forward(batch)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        result = decoder.forward(batch)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(result, expected)
    assert torch.equal(fused.cache, apart.cache)


def test_what_is_not_finite_stays_in_its_sequence(kernels: CpuKernels, tmp_path: Path) -> None:
    save_model(tmp_path, "Llama", **LLAMA)
    contents = torch.zeros_like(_cache(read_model_config(tmp_path)).data)
    batch = _batch([(20, 1), (0, 30), (40, 13)])
    poisoned = batch.ranges[2]
    contents[1, poisoned.block_table[0], 3, 0] = float("nan")
    side = _Side(tmp_path, kernels, contents, packed=True)
    hidden = FusedDecoder(side.config, side.weights, side.operations, kernels).forward(batch)
    assert hidden[poisoned.start :].isnan().all()
    assert hidden[: poisoned.start].isfinite().all()


@pytest.mark.parametrize("quantization", [None, *QUANTIZATIONS])
def test_a_stream_has_the_same_tokens_alone_and_in_company(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kernels: CpuKernels,
    quantization: str | None,
) -> None:
    save_model(tmp_path, "Llama", **LLAMA)
    monkeypatch.setattr(
        "millrace.engine.devices.cpu.loading.choose_product",
        lambda kernels, config: True,
    )
    settings = EngineConfig(
        device="cpu",
        dtype="bfloat16",
        num_blocks=64,
        max_batch_tokens=48,
        quantization=quantization,
    )

    def answers(streams: list[int]) -> dict[str, list[int]]:
        engine = Engine.load(tmp_path, settings)
        for stream in streams:
            engine.add(request(f"r{stream}", prompt(stream, 20 + 17 * stream, 90), max_tokens=24))
        return tokens_by_request(drain(engine))

    together = answers([0, 1, 2, 3, 4])
    assert [len(tokens) for tokens in together.values()] == [24] * 5
    for stream in range(5):
        assert answers([stream])[f"r{stream}"] == together[f"r{stream}"]


def test_layers_that_are_not_packed_have_no_step(tmp_path: Path, kernels: CpuKernels) -> None:
    save_model(tmp_path, "Llama", **LLAMA)
    contents = torch.zeros_like(_cache(read_model_config(tmp_path)).data)
    assert packed_layers(_Side(tmp_path, kernels, contents, packed=False).weights) is None

"""A KV cache in int8 on a CPU: the compiled kernels beside plain torch, a step beside its
operations, and engines beside those with a wide cache."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from millrace.engine.devices.cpu.attention import TorchAttention
from millrace.engine.devices.cpu.fused_decoder import FusedDecoder
from millrace.engine.devices.cpu.operations import CpuOperations, TorchOperations
from millrace.engine.kernels.operations import HeadNorms, Rotation
from millrace.engine.kv.cache import INT8_GROUP, KVCache, block_bytes
from millrace.engine.models.decoder import Decoder
from millrace.engine.models.linears import PackedProjection
from millrace.engine.models.loader import load_weights
from millrace.engine.step.batch import FlatBatch
from millrace.engine.step.engine import Engine
from millrace.registry.checkpoints.checkpoint import ModelConfig, read_model_config
from millrace.registry.checkpoints.fingerprint import weights_fingerprint
from millrace.schemas.config import EngineConfig
from millrace.schemas.errors import ConfigError
from tests.engine.checkpoints import save_llama, save_model
from tests.engine.devices.cpu.test_fused_decoder import LLAMA
from tests.engine.devices.cpu.test_operations import (
    BLOCK_SIZE,
    DTYPES,
    EPSILON,
    TOLERANCE,
    ragged_batch,
)
from tests.engine.kernels.compiled import compiled
from tests.engine.support import drain, last_by_request, prompt, request, tokens_by_request

_NUM_BLOCKS = 40
_CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


def _shape(num_kv_heads: int, group: int, head_dim: int) -> ModelConfig:
    return ModelConfig(
        architecture="LlamaForCausalLM",
        hidden_size=num_kv_heads * group * head_dim,
        num_hidden_layers=2,
        num_attention_heads=num_kv_heads * group,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=32,
        vocab_size=32,
        max_position_embeddings=512,
    )


def _cache(config: ModelConfig, num_blocks: int = _NUM_BLOCKS) -> KVCache:
    return KVCache(
        config,
        num_blocks=num_blocks,
        block_size_tokens=BLOCK_SIZE,
        dtype=torch.int8,
        device=_CPU,
    )


def _attention(
    config: ModelConfig, dtype: torch.dtype, windows: tuple[int | None, ...]
) -> TorchAttention:
    """Return attention over a cache with the same random contents each time."""
    cache = _cache(config)
    generator = torch.Generator().manual_seed(3)
    cache.data.copy_(torch.randint(-127, 128, cache.data.shape, generator=generator))
    assert cache.scales is not None
    cache.scales.copy_(torch.rand(cache.scales.shape, generator=generator) / 60 + 1e-3)
    return TorchAttention(cache, num_heads=config.num_attention_heads, dtype=dtype, windows=windows)


@DTYPES
@pytest.mark.parametrize("head_dim", [32, 64, 96, 256])
@pytest.mark.parametrize(("num_kv_heads", "group"), [(1, 1), (2, 3), (3, 5)])
def test_attention_is_that_of_torch(
    dtype: torch.dtype, head_dim: int, num_kv_heads: int, group: int
) -> None:
    rng = random.Random(f"{head_dim} {num_kv_heads} {group}")
    torch.manual_seed(rng.randrange(1 << 30))
    config = _shape(num_kv_heads, group, head_dim)
    lengths = [(0, 1), (3, 1), (15, 1), (16, 1), (77, 1), (200, 1), (0, 9), (30, 5)]
    batch = ragged_batch(lengths, _NUM_BLOCKS, rng)
    angles = torch.rand(len(batch.positions), head_dim // 2) * 6
    rotation = Rotation(angles.cos(), angles.sin())
    norms = HeadNorms(*(torch.rand(2, head_dim) + 0.5).to(dtype)) if group != 3 else None
    plain_attention, native_attention = (_attention(config, dtype, (None, 20)) for _ in range(2))
    plain = TorchOperations(plain_attention, epsilon=EPSILON)
    native = CpuOperations(native_attention, compiled(dtype), epsilon=EPSILON)
    of_plain, of_native = plain.prepare(batch, rotation), native.prepare(batch, rotation)
    tolerance = TOLERANCE[dtype]
    for layer in range(2):
        shape = (len(batch.positions), num_kv_heads * (group + 2), head_dim)
        heads = torch.randn(shape).to(dtype)
        expected = plain.attend(layer, heads.clone(), norms, of_plain)
        result = native.attend(layer, heads.clone(), norms, of_native)
        # A number between two codes may become either; keys are rotated and rounded twice here.
        torch.testing.assert_close(result, expected, atol=max(tolerance, 3e-2), rtol=tolerance)
        stored, wanted = (
            side.layer_tokens(layer).float() for side in (native_attention, plain_attention)
        )
        assert (stored - wanted).abs().max() <= wanted.abs().max() / 50


@pytest.mark.parametrize("is_native", [True, False])
def test_a_head_that_is_not_finite_shows_in_its_scale_alone(is_native: bool) -> None:
    attention = _attention(_shape(2, 1, 64), torch.bfloat16, (None, None))
    batch = ragged_batch([(4, 1), (20, 1), (33, 1)], 8, random.Random(1))
    heads = torch.randn(3, 6, 64).bfloat16()
    heads[1, 2, 5] = float("inf")
    rotation = Rotation(torch.ones(3, 32), torch.zeros(3, 32))
    if is_native:
        native = CpuOperations(attention, compiled(torch.bfloat16), epsilon=EPSILON)
        attended = native.attend(0, heads, None, native.prepare(batch, rotation))
    else:
        plain = TorchOperations(attention, epsilon=EPSILON)
        attended = plain.attend(0, heads, None, plain.prepare(batch, rotation))
    assert attended[1].isnan().any()
    assert attended[[0, 2]].isfinite().all()
    slot = batch.ranges[1].block_table[1] * BLOCK_SIZE + 4
    tokens = attention.layer_tokens(0)
    assert tokens[slot, 0, 0].isnan().all()
    assert tokens[slot, 0, 1].isfinite().all()


@pytest.mark.parametrize("is_native", [True, False])
def test_a_large_channel_of_keys_does_not_ruin_the_others(is_native: bool) -> None:
    """A few channels of a real model's keys are many times larger than the others."""
    head_dim, large = 64, 3
    attention = _attention(_shape(1, 1, head_dim), torch.bfloat16, (None, None))
    count = 30
    batch = ragged_batch([(0, count)], 8, random.Random(2))
    torch.manual_seed(5)
    heads = torch.randn(count, 3, head_dim).bfloat16()
    heads[:, 1, large] *= 50
    rotation = Rotation(torch.ones(count, head_dim // 2), torch.zeros(count, head_dim // 2))
    if is_native:
        native = CpuOperations(attention, compiled(torch.bfloat16), epsilon=EPSILON)
        native.attend(0, heads.clone(), None, native.prepare(batch, rotation))
    else:
        plain = TorchOperations(attention, epsilon=EPSILON)
        plain.attend(0, heads.clone(), None, plain.prepare(batch, rotation))
    table = batch.ranges[0].block_table
    slots = torch.tensor(
        [table[i // BLOCK_SIZE] * BLOCK_SIZE + i % BLOCK_SIZE for i in range(count)]
    )
    errors = (attention.layer_tokens(0)[slots, 0, 0] - heads[:, 1]).float().square().mean(0).sqrt()
    beyond = slice(INT8_GROUP, None)  # elements that do not share a scale with the large one
    assert errors[beyond].max() < 0.02
    assert errors[:INT8_GROUP].mean() > 5 * errors[beyond].mean()


class _Side:
    def __init__(self, checkpoint: Path) -> None:
        self.config = read_model_config(checkpoint)
        self.kernels = compiled(torch.bfloat16)
        self.attention = _attention(self.config, torch.bfloat16, self.config.windows)
        self.operations = CpuOperations(
            self.attention, self.kernels, epsilon=self.config.rms_norm_eps
        )
        self.weights = load_weights(
            checkpoint,
            self.config,
            dtype=torch.bfloat16,
            device=_CPU,
            product=partial(PackedProjection.of_wide, self.kernels),
        )


def _batch(lengths: list[tuple[int, int]]) -> FlatBatch:
    batch = ragged_batch(lengths, _NUM_BLOCKS, random.Random(3))
    torch.manual_seed(4)
    return batch._replace(token_ids=torch.randint(5, 85, (len(batch.positions),)))


@pytest.mark.parametrize("sliding_window", [None, 37])
def test_a_step_is_that_of_the_decoder(tmp_path: Path, sliding_window: int | None) -> None:
    family = "Llama" if sliding_window is None else "Mistral"
    changes = {} if sliding_window is None else {"sliding_window": sliding_window}
    save_model(tmp_path, family, **LLAMA | changes)
    fused, apart = _Side(tmp_path), _Side(tmp_path)
    decoder = FusedDecoder(fused.config, fused.weights, fused.operations, fused.kernels)
    plain = Decoder(apart.config, apart.weights, apart.operations)
    single = _batch([(0, 1), (3, 1), (40, 1), (300, 1), (16, 1)])
    assert torch.equal(decoder.forward(single), plain.forward(single))
    for layer in range(fused.config.num_hidden_layers):
        stored, wanted = (side.attention.layer_tokens(layer) for side in (fused, apart))
        assert torch.equal(stored, wanted)
    both = _batch([(9, 1), (0, 70), (130, 1), (5, 25), (90, 12)])
    expected = plain.forward(both).float()
    assert (decoder.forward(both).float() - expected).norm() < 0.03 * expected.norm()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    save_llama(path)
    return path


def _engine(checkpoint: Path, **settings: Any) -> Engine:
    config = EngineConfig(
        device="cpu", dtype="float32", num_blocks=256, kv_cache_dtype="int8", kernels="torch"
    )
    return Engine.load(checkpoint, msgspec.structs.replace(config, **settings))


def _requests(**params: Any) -> list[Any]:
    shared = prompt(9, 40)
    return [
        request(str(i), [*shared, *prompt(i, 3 + i)], max_tokens=16, ignore_eos=True, **params)
        for i in range(6)
    ]


def test_a_block_takes_about_half_the_memory() -> None:
    config = _shape(8, 4, 128)
    wide, small = (block_bytes(config, 16, dtype) for dtype in (torch.bfloat16, torch.int8))
    assert small < 0.54 * wide  # a code of 8 bits, and 16 bits of scale per 32 elements


def test_answers_are_near_those_of_a_wide_cache(checkpoint: Path) -> None:
    logprobs = []
    for settings in ({"kv_cache_dtype": "auto"}, {}):
        engine = _engine(checkpoint, **settings)
        for item in _requests(prompt_logprobs=0):
            engine.add(item)
        outputs = [output for output in drain(engine) if output.prompt_logprobs]
        scored = [one for output in outputs for one in output.prompt_logprobs if one is not None]
        logprobs.append(torch.tensor([one.logprob for one in scored]))
    wide, small = logprobs
    assert len(wide) == len(small) > 100
    assert 0 < (wide - small).abs().mean() < 0.05


def test_a_cache_a_cut_and_a_small_pool_change_no_token(checkpoint: Path) -> None:
    expected: dict[str, list[int]] = {}
    for settings in (
        {"prefix_cache": False},
        {"prefix_cache": True},
        {"max_batch_tokens": 7},
        {"num_blocks": 9, "max_batch_tokens": 24},
    ):
        engine = _engine(checkpoint, **settings)
        for _ in range(2):
            for item in _requests():
                engine.add(item)
            outputs = drain(engine)
            made = tokens_by_request(outputs)
            expected = expected or made
            assert made == expected
        if "num_blocks" in settings:
            assert max(one.num_preemptions for one in last_by_request(outputs).values()) > 0


def test_beams_copy_blocks_with_their_scales(checkpoint: Path) -> None:
    results = []
    for prefix_cache in (True, False):
        engine = _engine(checkpoint, prefix_cache=prefix_cache)
        engine.add(request("b", prompt(3, 21), max_tokens=10, n=3, use_beam_search=True))
        results.append([output.token_ids for output in drain(engine) if output.finished])
    assert results[0] == results[1]


def test_what_is_not_finite_is_scrubbed(tmp_path: Path) -> None:
    save_llama(tmp_path, nan_token=198)
    engine = _engine(tmp_path)
    engine.add(request("bad", [*prompt(1, 20, 190), 198], max_tokens=4))
    engine.add(request("good", prompt(2, 20, 190), max_tokens=4, ignore_eos=True))
    made = last_by_request(drain(engine))
    assert made["bad"].error is not None
    assert made["good"].error is None
    cache = engine._runner.cache
    assert cache.scales is not None
    assert cache.scales.isfinite().all()


def test_streams_do_not_move_between_caches_of_two_kinds(checkpoint: Path) -> None:
    prints = {weights_fingerprint(checkpoint, kv_cache_dtype=name) for name in (None, "int8")}
    assert len(prints) == 2


def test_each_device_has_its_own_8_bits(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="An 8-bit KV cache on a CPU is int8"):
        Engine.load(checkpoint, EngineConfig(device="cpu", kv_cache_dtype="fp8"))
    with pytest.raises(ConfigError, match="kv_cache_dtype to fp8 for a GPU"):
        Engine.load(
            checkpoint, EngineConfig(device="cpu", kernels="reference", kv_cache_dtype="int8")
        )

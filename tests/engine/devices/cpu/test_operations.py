"""Compiled kernels, compared with plain torch on the same inputs and the same KV cache."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from millrace.engine.devices.cpu.attention import TorchAttention
from millrace.engine.devices.cpu.operations import CpuOperations, TorchOperations
from millrace.engine.kernels.build import KernelBuildError, cpu_library
from millrace.engine.kernels.cpu import HEAD_DIMS
from millrace.engine.kernels.operations import HeadNorms, Rotation
from millrace.engine.kv.cache import KVCache
from millrace.engine.step.batch import FlatBatch, QueryRange
from millrace.engine.step.engine import Engine
from millrace.registry.checkpoints.checkpoint import ModelConfig
from millrace.schemas.config import EngineConfig
from millrace.schemas.errors import ConfigError
from tests.engine.checkpoints import save_llama
from tests.engine.kernels.compiled import compiled
from tests.engine.support import drain, prompt, request, tokens_by_request

EPSILON = 1e-6
BLOCK_SIZE = 16
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda d: str(d).removeprefix("torch."))


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


def attention(
    num_heads: int, windows: Sequence[int | None], contents: torch.Tensor
) -> TorchAttention:
    """Return attention over a KV cache with these contents: [num_layers, num_blocks + 1,
    block_size, 2, num_kv_heads, head_dim]."""
    num_layers, num_blocks, _, _, num_kv_heads, head_dim = contents.shape
    config = ModelConfig(
        architecture="LlamaForCausalLM",
        hidden_size=num_heads * head_dim,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=32,
        vocab_size=32,
        max_position_embeddings=512,
    )
    cache = KVCache(
        config,
        num_blocks=num_blocks - 1,
        block_size_tokens=BLOCK_SIZE,
        dtype=contents.dtype,
        device=torch.device("cpu"),
    )
    cache.data.copy_(contents)
    return TorchAttention(cache, num_heads=num_heads, dtype=contents.dtype, windows=windows)


def assert_close(result: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[result.dtype]
    torch.testing.assert_close(result, expected, atol=tolerance, rtol=tolerance)


def ragged_batch(lengths: list[tuple[int, int]], num_blocks: int, rng: random.Random) -> FlatBatch:
    """Return a batch of (context, new tokens) with blocks in any order."""
    free = rng.sample(range(num_blocks), num_blocks)
    ranges: list[QueryRange] = []
    positions: list[int] = []
    single = sorted(pair for pair in lengths if pair[1] == 1)
    for context, count in (*single, *(pair for pair in lengths if pair[1] > 1)):
        table = [free.pop() for _ in range(-(-(context + count) // BLOCK_SIZE))]
        ranges.append(QueryRange(len(positions), count, context, table))
        positions += range(context, context + count)
    rows = torch.zeros(len(positions), dtype=torch.int64)
    return FlatBatch(
        token_ids=rows,
        positions=torch.tensor(positions),
        ranges=ranges,
        num_single=len(single),
        sampled_rows=rows[:0],
        sampled=[],
        pooled=[],
        scored=[],
    )


@DTYPES
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(("num_kv_heads", "group"), [(1, 1), (2, 3), (4, 2), (3, 5), (1, 8)])
def test_attention_is_that_of_torch(
    dtype: torch.dtype, head_dim: int, num_kv_heads: int, group: int
) -> None:
    rng = random.Random(f"{head_dim} {num_kv_heads} {group}")
    torch.manual_seed(rng.randrange(1 << 30))
    num_heads, num_blocks = num_kv_heads * group, 40
    windows = (None, 20)
    lengths = [(0, 1), (3, 1), (15, 1), (16, 1), (77, 1), (200, 1), (0, 9), (30, 5)]
    rng.shuffle(lengths)
    batch = ragged_batch(lengths, num_blocks, rng)
    num_tokens = len(batch.positions)
    data = torch.randn(2, num_blocks + 1, BLOCK_SIZE, 2, num_kv_heads, head_dim).to(dtype)
    angles = torch.rand(num_tokens, head_dim // 2) * 6
    rotation = Rotation(angles.cos(), angles.sin())
    norms = HeadNorms(*(torch.rand(2, head_dim) + 0.5).to(dtype)) if group != 3 else None
    plain_attention = attention(num_heads, windows, data)
    plain = TorchOperations(plain_attention, epsilon=EPSILON)
    native_attention = attention(num_heads, windows, data)
    native = CpuOperations(native_attention, compiled(dtype), epsilon=EPSILON)
    of_plain, of_native = plain.prepare(batch, rotation), native.prepare(batch, rotation)
    for layer in range(2):
        heads = torch.randn(num_tokens, num_heads + 2 * num_kv_heads, head_dim).to(dtype)
        expected = plain.attend(layer, heads.clone(), norms, of_plain)
        result = native.attend(layer, heads.clone(), norms, of_native)
        assert result.shape == expected.shape
        assert_close(result, expected)
        assert_close(native_attention.layer_tokens(layer), plain_attention.layer_tokens(layer))


@DTYPES
@pytest.mark.parametrize(("num_rows", "width"), [(1, 32), (3, 96), (64, 2048), (0, 64)])
def test_rowwise_operations_are_those_of_torch(
    dtype: torch.dtype, num_rows: int, width: int
) -> None:
    torch.manual_seed(num_rows)
    data = torch.zeros(1, 2, BLOCK_SIZE, 2, 1, 32, dtype=dtype)
    plain = TorchOperations(attention(1, [None], data), epsilon=EPSILON)
    native = CpuOperations(attention(1, [None], data), compiled(dtype), epsilon=EPSILON)
    rows, weight = torch.randn(num_rows, width), torch.rand(width).to(dtype)
    assert_close(native.rms_norm(rows, weight), plain.rms_norm(rows, weight))
    gate_up = (torch.randn(num_rows, 2 * width) * 20).to(dtype)
    assert_close(native.swiglu(gate_up), plain.swiglu(gate_up))


@DTYPES
def test_what_is_not_finite_stays_so_and_stays_in_its_row(dtype: torch.dtype) -> None:
    data = torch.zeros(1, 9, BLOCK_SIZE, 2, 1, 64, dtype=dtype)
    native = CpuOperations(attention(2, [None], data), compiled(dtype), epsilon=EPSILON)
    batch = ragged_batch([(4, 1), (20, 1), (33, 1)], 8, random.Random(1))
    heads = torch.randn(3, 4, 64).to(dtype)
    heads[1, 2] = float("nan")
    rotation = Rotation(torch.ones(3, 32), torch.zeros(3, 32))
    attended = native.attend(0, heads, None, native.prepare(batch, rotation))
    assert attended[1].isnan().any()
    assert attended[[0, 2]].isfinite().all()
    rows = torch.ones(2, 64)
    rows[0, 5] = float("inf")
    assert not native.rms_norm(rows, torch.ones(64, dtype=dtype))[0].isfinite().all()
    extremes = torch.tensor([[-3e38, 3e38, float("nan"), float("inf")] * 16]).to(dtype)
    expected = torch.nn.functional.silu(extremes[:, :32]) * extremes[:, 32:]
    torch.testing.assert_close(native.swiglu(extremes), expected, equal_nan=True)


def test_a_compiler_that_fails_is_told_by_its_own_words(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiler = tmp_path / "broken"
    compiler.write_text("#!/bin/sh\necho no such register >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(KernelBuildError, match="no such register"):
        cpu_library()
    monkeypatch.setenv("CXX", "not-on-the-path")
    with pytest.raises(KernelBuildError, match="no C\\+\\+ compiler"):
        cpu_library()


def test_processes_that_start_together_compile_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiler = tmp_path / "slow"
    compiler.write_text(
        '#!/bin/sh\necho once >> "$0.log"\nwhile [ $# -gt 1 ]; do\n'
        '[ "$1" = -o ] && touch "$2"\nshift\ndone\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", str(compiler))
    with ThreadPoolExecutor(4) as pool:
        made = set(pool.map(lambda _: cpu_library(), range(4)))
    assert len(made) == 1
    assert Path(f"{compiler}.log").read_text() == "once\n"


def test_an_engine_without_a_compiler_answers_the_same(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    save_llama(tmp_path, hidden_size=64, intermediate_size=64, num_attention_heads=2, head_dim=32)

    def answer(kernels: str) -> list[int]:
        engine = Engine.load(tmp_path, EngineConfig(device="cpu", num_blocks=8, kernels=kernels))
        engine.add(request("r", prompt(1, 20), max_tokens=8, temperature=0.0))
        return tokens_by_request(drain(engine))["r"]

    compiled = answer("native")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", "not-on-the-path")
    assert answer("auto") == answer("torch") == compiled
    with pytest.raises(ConfigError, match="there are no kernels: There is no C\\+\\+ compiler"):
        answer("native")
    with pytest.raises(ConfigError, match="choose auto, native, torch, triton, reference"):
        answer("fast")

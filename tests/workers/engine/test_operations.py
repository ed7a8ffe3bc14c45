"""The compiled kernels beside plain torch: same inputs, same KV cache, same results."""

from __future__ import annotations

import random
from typing import NamedTuple

import pytest
import torch

from workers.engine.attention import TorchAttention
from workers.engine.batch import FlatBatch, QueryRange
from workers.engine.cpu_operations import CpuOperations
from workers.engine.operations import HeadNorms, Rotation, TorchOperations
from workers.kernels.build import KernelBuildError, cpu_library
from workers.kernels.cpu import HEAD_DIMS, CpuKernels

EPSILON = 1e-6
BLOCK_SIZE = 16
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda d: str(d).removeprefix("torch."))


class Cache(NamedTuple):
    """As much of a KV cache as attention needs."""

    data: torch.Tensor
    null_block: int


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.inference_mode():
        yield


def kernels(dtype: torch.dtype) -> CpuKernels:
    try:
        return CpuKernels(cpu_library(), dtype)
    except KernelBuildError as error:
        pytest.skip(error.message)


def attention(dtype: torch.dtype, shape: tuple[int, int, int], windows: list[int | None], data):
    _, num_heads, _ = shape
    cache = Cache(data.clone(), data.shape[1] - 1)
    return TorchAttention(cache, num_heads=num_heads, dtype=dtype, windows=windows)


def ragged_batch(lengths: list[tuple[int, int]], num_blocks: int, rng: random.Random) -> FlatBatch:
    """A batch of (context, new tokens) with blocks from anywhere."""
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
def test_attention_is_that_of_torch(dtype, head_dim, num_kv_heads, group):
    rng = random.Random(f"{head_dim} {num_kv_heads} {group}")
    torch.manual_seed(rng.randrange(1 << 30))
    num_heads, num_blocks = num_kv_heads * group, 40
    windows = [None, 20]
    lengths = [(0, 1), (3, 1), (15, 1), (16, 1), (77, 1), (200, 1), (0, 9), (30, 5)]
    rng.shuffle(lengths)
    batch = ragged_batch(lengths, num_blocks, rng)
    num_tokens = len(batch.positions)
    data = torch.randn(2, num_blocks + 1, BLOCK_SIZE, 2, num_kv_heads, head_dim).to(dtype)
    shape = (num_kv_heads, num_heads, head_dim)
    angles = torch.rand(num_tokens, head_dim // 2) * 6
    rotation = Rotation(angles.cos(), angles.sin())
    norms = HeadNorms(*(torch.rand(2, head_dim) + 0.5).to(dtype)) if group != 3 else None
    plain_attention = attention(dtype, shape, windows, data)
    plain = TorchOperations(plain_attention, epsilon=EPSILON)
    native_attention = attention(dtype, shape, windows, data)
    native = CpuOperations(native_attention, kernels(dtype), epsilon=EPSILON)
    of_plain, of_native = plain.prepare(batch, rotation), native.prepare(batch, rotation)
    for layer in range(2):
        heads = torch.randn(num_tokens, num_heads + 2 * num_kv_heads, head_dim).to(dtype)
        expected = plain.attend(layer, heads.clone(), norms, of_plain)
        result = native.attend(layer, heads.clone(), norms, of_native)
        assert result.shape == expected.shape
        torch.testing.assert_close(
            result.float(), expected.float(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
        )
        torch.testing.assert_close(
            native_attention.layer_tokens(layer).float(),
            plain_attention.layer_tokens(layer).float(),
            atol=TOLERANCE[dtype],
            rtol=TOLERANCE[dtype],
        )


@DTYPES
@pytest.mark.parametrize(("num_rows", "width"), [(1, 32), (3, 96), (64, 2048), (0, 64)])
def test_rowwise_operations_are_those_of_torch(dtype, num_rows, width):
    torch.manual_seed(num_rows)
    shape = (1, 1, 32)
    data = torch.zeros(1, 2, BLOCK_SIZE, 2, 1, 32, dtype=dtype)
    plain = TorchOperations(attention(dtype, shape, [None], data), epsilon=EPSILON)
    native = CpuOperations(attention(dtype, shape, [None], data), kernels(dtype), epsilon=EPSILON)
    rows, weight = torch.randn(num_rows, width).to(dtype), torch.rand(width).to(dtype)
    close = {"atol": TOLERANCE[dtype], "rtol": TOLERANCE[dtype]}
    torch.testing.assert_close(native.rms_norm(rows, weight), plain.rms_norm(rows, weight), **close)
    gate_up = (torch.randn(num_rows, 2 * width) * 20).to(dtype)
    torch.testing.assert_close(native.swiglu(gate_up), plain.swiglu(gate_up), **close)


@DTYPES
def test_what_is_not_finite_stays_so_and_stays_in_its_row(dtype):
    data = torch.zeros(1, 9, BLOCK_SIZE, 2, 1, 64, dtype=dtype)
    native = CpuOperations(
        attention(dtype, (1, 2, 64), [None], data), kernels(dtype), epsilon=EPSILON
    )
    batch = ragged_batch([(4, 1), (20, 1), (33, 1)], 8, random.Random(1))
    heads = torch.randn(3, 4, 64).to(dtype)
    heads[1, 2] = float("nan")
    rotation = Rotation(torch.ones(3, 32), torch.zeros(3, 32))
    attended = native.attend(0, heads, None, native.prepare(batch, rotation))
    assert attended[1].isnan().any()
    assert attended[[0, 2]].isfinite().all()
    rows = torch.ones(2, 64, dtype=dtype)
    rows[0, 5] = float("inf")
    assert not native.rms_norm(rows, torch.ones(64, dtype=dtype))[0].isfinite().all()
    extremes = torch.tensor([[-3e38, 3e38, float("nan"), float("inf")] * 16]).to(dtype)
    expected = torch.nn.functional.silu(extremes[:, :32]) * extremes[:, 32:]
    torch.testing.assert_close(native.swiglu(extremes), expected, equal_nan=True)


def test_a_compiler_that_fails_is_told_by_its_own_words(monkeypatch, tmp_path):
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

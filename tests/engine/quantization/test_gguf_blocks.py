"""GGUF's quantized types, compared with the dequantization of the ``gguf`` package."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from millrace.engine.quantization.gguf_blocks import QUANTIZED_TYPES, quantized_rows
from millrace.engine.quantization.packing import can_be_packed

_KINDS = sorted(QUANTIZED_TYPES)
_HALVES = {
    GGMLQuantizationType.Q2_K: (80, 82),
    GGMLQuantizationType.Q3_K: (108,),
    GGMLQuantizationType.Q6_K: (208,),
    GGMLQuantizationType.Q4_1: (0, 2),
    GGMLQuantizationType.Q5_1: (0, 2),
    GGMLQuantizationType.Q4_K: (0, 2),
    GGMLQuantizationType.Q5_K: (0, 2),
    GGMLQuantizationType.MXFP4: (),
}
"""Places of float16 numbers in a block; the first bytes in other types."""


def drawn_rows(kind: GGMLQuantizationType, num_rows: int, num_blocks: int) -> torch.Tensor:
    """Rows of random bytes, whose float16 numbers are finite: some are negative or subnormal."""
    block_bytes = GGML_QUANT_SIZES[kind][1]
    draw = np.random.default_rng(int(kind))
    blocks = draw.integers(0, 256, (num_rows, num_blocks, block_bytes), dtype=np.uint8)
    for place in _HALVES.get(kind, (0,)):
        halves = draw.standard_normal((num_rows, num_blocks, 1)).astype(np.float16)
        halves[0, 0] = np.float16(6e-8)
        blocks[..., place : place + 2] = halves.view(np.uint8)
    return torch.from_numpy(blocks).flatten(1)


@pytest.mark.parametrize("kind", _KINDS, ids=lambda kind: kind.name)
def test_values_equal_the_packages_bit_for_bit(kind: GGMLQuantizationType) -> None:
    rows = drawn_rows(kind, 5, 3)
    weight = quantized_rows(kind, rows)
    expected = torch.from_numpy(quants.dequantize(rows.numpy(), kind))
    assert weight.values().shape == expected.shape
    assert torch.equal(weight.values().view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize("kind", _KINDS, ids=lambda kind: kind.name)
def test_codes_have_the_bits_that_the_kernels_read(kind: GGMLQuantizationType) -> None:
    weight = quantized_rows(kind, drawn_rows(kind, 4, 2))
    assert can_be_packed(weight)
    moved = weight.codes.int() + weight.code_zero
    if weight.bits < 8:
        assert moved.min() >= 0
        assert moved.max() < 1 << weight.bits

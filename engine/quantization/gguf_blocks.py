"""Blocks of GGUF's quantized types: their codes, scales and offsets.

Every type is a grid of small integers with a scale, and in some types an offset, for 16 or 32
neighbouring inputs. So a tensor of any type is a ``QuantizedWeight``, whose values equal the
``gguf`` package's bit for bit. The layouts are as in llama.cpp's ``ggml-common.h``.
Rows that the weights multiply are rounded to int16, finer than the int8 of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from millrace.engine.quantization.weight import Activations, QuantizedWeight

_IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
# Values of e2m1, doubled.
_MXFP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
WIDE_TYPES = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}


class _Parts(NamedTuple):
    """Decoded blocks: ``codes`` int8 [..., block_size]; ``scales`` and ``offsets`` float32
    [..., groups of a block].
    """

    codes: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor | None = None


class _Type(NamedTuple):
    bits: int
    group_inputs: int
    decode: Callable[[torch.Tensor], _Parts]


def quantized_rows(kind: GGMLQuantizationType, rows: torch.Tensor) -> QuantizedWeight:
    """Return the weight whose stored ``rows`` are uint8 [num_outputs, bytes of a row].

    ``kind`` must be one of ``QUANTIZED_TYPES``, and a row must have whole blocks.
    """
    stored = QUANTIZED_TYPES[kind]
    block_bytes = GGML_QUANT_SIZES[kind][1]
    parts = stored.decode(rows.reshape(len(rows), -1, block_bytes))
    return QuantizedWeight(
        codes=parts.codes.flatten(1).contiguous(),
        scales=parts.scales.flatten(1).contiguous(),
        group_inputs=stored.group_inputs,
        bits=stored.bits,
        activations=Activations.INT16_GROUP,
        offsets=None if parts.offsets is None else parts.offsets.flatten(1).contiguous(),
    )


def _half(stored: torch.Tensor) -> torch.Tensor:
    """Return the float16 numbers of pairs of bytes, in float32."""
    return stored.contiguous().view(torch.float16).float()


def _bits(stored: torch.Tensor, num_bits: int, width: int) -> torch.Tensor:
    """Return the fields of ``num_bits`` of each ``width`` neighbouring bytes, lowest bits of all
    bytes first: uint8 [..., number of bytes * 8 / num_bits].
    """
    shifts = torch.arange(0, 8, num_bits, dtype=torch.uint8).unsqueeze(-1)
    spans = stored.reshape(*stored.shape[:-1], -1, 1, width)
    return ((spans >> shifts) & ((1 << num_bits) - 1)).flatten(-3)


def _nibbles(stored: torch.Tensor) -> torch.Tensor:
    return _bits(stored, 4, 16)


def _looked_up(stored: torch.Tensor, values: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int8)[_nibbles(stored).int()]


def _signed(codes: torch.Tensor, middle: int) -> torch.Tensor:
    return codes.to(torch.int8) - middle


def _high_bits(stored: torch.Tensor) -> torch.Tensor:
    """Return the fifth bits of 32 codes, one byte after another."""
    return _bits(stored, 1, 1) << 4


def _q4_0(blocks: torch.Tensor) -> _Parts:
    return _Parts(_signed(_nibbles(blocks[..., 2:]), 8), _half(blocks[..., :2]))


def _q4_1(blocks: torch.Tensor) -> _Parts:
    codes = _nibbles(blocks[..., 4:]).to(torch.int8)
    return _Parts(codes, _half(blocks[..., :2]), _half(blocks[..., 2:4]))


def _q5_0(blocks: torch.Tensor) -> _Parts:
    codes = _nibbles(blocks[..., 6:]) | _high_bits(blocks[..., 2:6])
    return _Parts(_signed(codes, 16), _half(blocks[..., :2]))


def _q5_1(blocks: torch.Tensor) -> _Parts:
    codes = _nibbles(blocks[..., 8:]) | _high_bits(blocks[..., 4:8])
    return _Parts(codes.to(torch.int8), _half(blocks[..., :2]), _half(blocks[..., 2:4]))


def _q8_0(blocks: torch.Tensor) -> _Parts:
    return _Parts(blocks[..., 2:].contiguous().view(torch.int8), _half(blocks[..., :2]))


def _q2_k(blocks: torch.Tensor) -> _Parts:
    factors = blocks[..., :16]
    scales = _half(blocks[..., 80:82]) * (factors & 15).float()
    offsets = _half(blocks[..., 82:84]) * (factors >> 4).float()
    return _Parts(_bits(blocks[..., 16:80], 2, 32).to(torch.int8), scales, -offsets)


def _q3_k(blocks: torch.Tensor) -> _Parts:
    low = _bits(blocks[..., 96:104], 4, 8)
    high = _bits(blocks[..., 104:108], 2, 4) << 4
    scales = _half(blocks[..., 108:110]) * _signed(low | high, 32).float()
    # A code is lowered by 4 where its mask bit is 0.
    lowered = (_bits(blocks[..., :32], 1, 32) ^ 1) << 2
    codes = _bits(blocks[..., 32:96], 2, 32).to(torch.int8) - lowered.to(torch.int8)
    return _Parts(codes, scales)


def _k_scales(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scales and offsets of the 8 groups of a Q4_K or Q5_K block."""
    low, least, rest = blocks[..., 4:16].reshape(*blocks.shape[:-1], 3, 4).unbind(-2)
    factors = torch.cat([low & 63, (rest & 15) | ((low >> 2) & 48)], -1)
    minima = torch.cat([least & 63, (rest >> 4) | ((least >> 2) & 48)], -1)
    scales = _half(blocks[..., :2]) * factors.float()
    return scales, -(_half(blocks[..., 2:4]) * minima.float())


def _q4_k(blocks: torch.Tensor) -> _Parts:
    return _Parts(_bits(blocks[..., 16:], 4, 32).to(torch.int8), *_k_scales(blocks))


def _q5_k(blocks: torch.Tensor) -> _Parts:
    codes = _bits(blocks[..., 48:], 4, 32) | (_bits(blocks[..., 16:48], 1, 32) << 4)
    return _Parts(codes.to(torch.int8), *_k_scales(blocks))


def _q6_k(blocks: torch.Tensor) -> _Parts:
    codes = _bits(blocks[..., :128], 4, 64) | (_bits(blocks[..., 128:192], 2, 32) << 4)
    scales = blocks[..., 192:208].contiguous().view(torch.int8).float()
    return _Parts(_signed(codes, 32), _half(blocks[..., 208:210]) * scales)


def _iq4_nl(blocks: torch.Tensor) -> _Parts:
    return _Parts(_looked_up(blocks[..., 2:], _IQ4_VALUES), _half(blocks[..., :2]))


def _iq4_xs(blocks: torch.Tensor) -> _Parts:
    # The scales' high bits are eight pairs of bits in two bytes, their low bits nibbles.
    factors = _bits(blocks[..., 4:8], 4, 1) | (_bits(blocks[..., 2:4], 2, 1) << 4)
    scales = _half(blocks[..., :2]) * _signed(factors, 32).float()
    return _Parts(_looked_up(blocks[..., 8:], _IQ4_VALUES), scales)


def _mxfp4(blocks: torch.Tensor) -> _Parts:
    exponents = blocks[..., :1].int()
    # The two least exponents make subnormal numbers.
    words = torch.where(exponents < 2, 0x00200000 << exponents.clamp(max=1), (exponents - 1) << 23)
    return _Parts(_looked_up(blocks[..., 1:], _MXFP4_VALUES), words.view(torch.float32))


QUANTIZED_TYPES = {
    GGMLQuantizationType.Q4_0: _Type(4, 32, _q4_0),
    GGMLQuantizationType.Q4_1: _Type(4, 32, _q4_1),
    GGMLQuantizationType.Q5_0: _Type(5, 32, _q5_0),
    GGMLQuantizationType.Q5_1: _Type(5, 32, _q5_1),
    GGMLQuantizationType.Q8_0: _Type(8, 32, _q8_0),
    GGMLQuantizationType.Q2_K: _Type(4, 16, _q2_k),
    GGMLQuantizationType.Q3_K: _Type(4, 16, _q3_k),
    GGMLQuantizationType.Q4_K: _Type(4, 32, _q4_k),
    GGMLQuantizationType.Q5_K: _Type(5, 32, _q5_k),
    GGMLQuantizationType.Q6_K: _Type(6, 16, _q6_k),
    GGMLQuantizationType.IQ4_NL: _Type(8, 32, _iq4_nl),
    GGMLQuantizationType.IQ4_XS: _Type(8, 32, _iq4_xs),
    GGMLQuantizationType.MXFP4: _Type(5, 32, _mxfp4),
}

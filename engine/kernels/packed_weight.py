"""Weights in the layout of the compiled products."""

from __future__ import annotations

import ctypes
from enum import IntEnum
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)

from millrace.engine.kernels.operations import WeightSize

PANEL_OUTPUTS = 16
# Inputs that a product takes at a time, kUnrolled in weights.h.
INPUT_MULTIPLE = 8


class Format(IntEnum):
    """Format of weights, see weights.h."""

    BFLOAT16 = 0
    INT8 = 1
    FLOAT8 = 2
    INT4 = 3
    INT8_DOT = 4
    GROUP4 = 6
    GROUP5 = 7
    GROUP6 = 8
    GROUP8 = 9


class RowCodes(IntEnum):
    """Rounding of a row before a product, ``Activation`` in weights.h."""

    NONE = 0
    INT8 = 1
    INT8_STATIC = 2
    FLOAT8 = 3
    FLOAT8_STATIC = 4
    FLOAT8_GROUPS = 5
    INT16_GROUPS = 6


class _Weight(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("codes", "scales", "offsets", "bias", "order")),
        ("group_inputs", ctypes.c_int64),
        ("format", ctypes.c_int32),
        ("activation", ctypes.c_int32),
        ("activation_scale", ctypes.c_float),
        ("scale_type", ctypes.c_int32),
        ("code_zero", ctypes.c_int32),
    )


class Panels(NamedTuple):
    """Tensors to which ``Weight`` of weights.h points.

    ``scales`` and ``offsets`` are float32, or both float16 for formats of groups.
    """

    codes: torch.Tensor
    scales: torch.Tensor | None = None
    offsets: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    order: torch.Tensor | None = None


class PackedWeight:
    """Weight [num_outputs, num_inputs] for the products of ``CpuKernels``.

    ``group_inputs`` inputs share a scale. ``code_zero`` was added to the codes of a format of
    groups. Owns ``panels``. ``address`` is the address of a
    ``Weight``, valid while this object lives.

    Raises:
        ValueError: The inputs are no multiple of 8; a product would read past their end.
    """

    def __init__(
        self,
        panels: Panels,
        shape: tuple[int, int],
        *,
        group_inputs: int,
        format: Format = Format.BFLOAT16,  # noqa: A002 (its name in weights.h)
        row_codes: RowCodes = RowCodes.NONE,
        row_scale: float = 1.0,
        code_zero: int = 0,
    ) -> None:
        self.num_outputs, self.num_inputs = shape
        if self.num_inputs % INPUT_MULTIPLE:
            raise ValueError(f"{self.num_inputs} inputs are no multiple of {INPUT_MULTIPLE}")
        self._panels = panels
        pointers = [0 if tensor is None else tensor.data_ptr() for tensor in panels]
        is_half = panels.scales is not None and panels.scales.dtype is torch.float16
        self._weight = _Weight(
            *pointers, group_inputs, format, row_codes, row_scale, is_half, code_zero
        )

    @property
    def address(self) -> int:
        return ctypes.addressof(self._weight)

    @property
    def size(self) -> WeightSize:
        parts = (self._panels.codes, self._panels.scales, self._panels.offsets)
        num_bytes = sum(part.numel() * part.element_size() for part in parts if part is not None)
        return WeightSize(self.num_outputs * self.num_inputs, num_bytes)


def pack_weight(weight: torch.Tensor, bias: torch.Tensor | None) -> PackedWeight:
    """Pack a bfloat16 ``weight`` [num_outputs, num_inputs] and its ``bias`` [num_outputs]."""
    num_outputs, num_inputs = weight.shape
    if num_inputs % INPUT_MULTIPLE:
        raise ValueError(f"{num_inputs} inputs are no multiple of {INPUT_MULTIPLE}")
    codes = in_panels(weight, 2)
    shape = (num_outputs, num_inputs)
    return PackedWeight(Panels(codes, bias=bias), shape, group_inputs=num_inputs)


def in_panels(values: torch.Tensor, width: int) -> torch.Tensor:
    """Pack [num_outputs, num_inputs] as [num_panels, num_inputs / width, 16, width].

    Outputs are padded with zeros to a multiple of 32.
    """
    num_outputs, num_inputs = values.shape
    filled = F.pad(values, (0, 0, 0, -num_outputs % (2 * PANEL_OUTPUTS)))
    panels = filled.view(-1, PANEL_OUTPUTS, num_inputs // width, width)
    return panels.permute(0, 2, 1, 3).contiguous()

"""Quantized weight, independent of its checkpoint's format."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)

# Inputs of a row that share a scale of ``INT16_GROUP``, whatever the weight's own groups.
ROW_GROUP_INPUTS = 32
_MOST_BITS = 8
_MOST_INT8, _MOST_INT16, _MOST_FLOAT8 = 127.0, 32767.0, 448.0


class Activations(enum.Enum):
    """Format to which rows are rounded before a quantized weight multiplies them.

    A scale of ``_TOKEN`` is a row's largest magnitude over the largest of the type. ``_GROUP`` has
    such a scale for each of the weight's groups of inputs, and ``INT16_GROUP`` one for each 32
    inputs. The scale of ``_TENSOR`` is a constant.
    """

    WIDE = "wide"
    INT8_TOKEN = "int8_token"  # noqa: S105 (a token of text)
    INT8_TENSOR = "int8_tensor"
    FLOAT8_TOKEN = "float8_token"  # noqa: S105 (a token of text)
    FLOAT8_TENSOR = "float8_tensor"
    FLOAT8_GROUP = "float8_group"
    INT16_GROUP = "int16_group"

    @property
    def is_static(self) -> bool:
        """True if the scale is a constant."""
        return self in (Activations.INT8_TENSOR, Activations.FLOAT8_TENSOR)

    @property
    def may_stay_wide(self) -> bool:
        """True if products may take rows in the model's dtype.

        ``INT16_GROUP`` serves products of integers. It changes rows less than their dtype rounds
        them, so products of floats leave it out.
        """
        return self in (Activations.WIDE, Activations.INT16_GROUP)


class Rounding(NamedTuple):
    """Rounding of rows.

    ``scale`` is the constant of static ``activations``. ``group_inputs`` is the number of inputs
    that share a scale of ``FLOAT8_GROUP`` or ``INT16_GROUP``.
    """

    activations: Activations
    scale: float | None
    group_inputs: int

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Return ``rows`` [num_rows, num_inputs] rounded, in their own dtype."""
        kind = self.activations
        if kind is Activations.WIDE:
            return rows
        is_int8 = kind in (Activations.INT8_TOKEN, Activations.INT8_TENSOR)
        is_int16 = kind is Activations.INT16_GROUP
        most = _MOST_INT8 if is_int8 else _MOST_INT16 if is_int16 else _MOST_FLOAT8
        values = rows.float()
        if kind in (Activations.FLOAT8_GROUP, Activations.INT16_GROUP):
            padded = F.pad(values, (0, -rows.shape[1] % self.group_inputs))
            num_groups = padded.shape[1] // self.group_inputs
            values = padded.view(len(rows), num_groups, self.group_inputs)
        if kind.is_static:
            assert self.scale is not None, "a static scale is part of the weight"
            scales = torch.full((), self.scale, device=rows.device)
        else:
            scales = values.abs().amax(-1, keepdim=True) / most
            scales = torch.where(scales == 0, 1.0, scales)
        scaled = values / scales
        if is_int8:
            codes = scaled.clamp(-most - 1, most).round()
        elif is_int16:
            codes = scaled.clamp(-most, most).round()
        else:
            codes = scaled.clamp(-most, most).to(torch.float8_e4m3fn).float()
        return (codes * scales).flatten(1)[:, : rows.shape[1]].to(rows.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedWeight:
    """Weight [num_outputs, num_inputs] of a linear map.

    Each number is (code - zero) * scale + offset. ``codes`` is [num_outputs, num_inputs], int8, or
    float8_e4m3fn with ``bits`` 8. Codes of 4, 5 or 6 ``bits`` are signed, or with ``offsets`` all
    signed or all from 0 on. ``scales`` is float32 [num_outputs, num_groups], one for each
    ``group_inputs`` neighbouring codes of an output; the last group may be shorter. ``zeros`` is
    int16 shaped as ``scales``, or None if all are 0, as for floats. ``offsets`` is float32 shaped
    as ``scales``, or None if all are 0. ``order`` is int64 [num_inputs], the input that each column
    of ``codes`` multiplies, or None if columns are in the inputs' order. ``activation_scale`` is
    the constant of static ``activations``.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    group_inputs: int
    bits: int = 8
    zeros: torch.Tensor | None = None
    order: torch.Tensor | None = None
    activations: Activations = Activations.WIDE
    activation_scale: float | None = None
    offsets: torch.Tensor | None = None

    @property
    def rounding(self) -> Rounding:
        """Rounding of the rows that it multiplies."""
        is_int16 = self.activations is Activations.INT16_GROUP
        group_inputs = ROW_GROUP_INPUTS if is_int16 else self.group_inputs
        return Rounding(self.activations, self.activation_scale, group_inputs)

    @property
    def code_zero(self) -> int:
        """Number that moves codes of 4, 5 or 6 ``bits`` to 0 and above; else 0.

        Codes without contents, on the meta device, count as signed.
        """
        codes = self.codes
        is_signed = self.offsets is None or codes.is_meta or bool((codes < 0).any())
        return 1 << self.bits - 1 if self.bits < 8 and is_signed else 0

    @property
    def num_outputs(self) -> int:
        return self.codes.shape[0]

    @property
    def num_inputs(self) -> int:
        return self.codes.shape[1]

    def values(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return the dequantized weight, inputs in their own order: [num_outputs, num_inputs]."""
        values = self.codes.to(dtype)
        if self.zeros is not None:
            values -= self._of_each_input(self.zeros.to(dtype))
        values *= self._of_each_input(self.scales.to(dtype))
        if self.offsets is not None:
            values += self._of_each_input(self.offsets.to(dtype))
        if self.order is None:
            return values
        return torch.empty_like(values).index_copy_(1, self.order, values)

    def _of_each_input(self, of_groups: torch.Tensor) -> torch.Tensor:
        if of_groups.shape[1] == 1:
            return of_groups
        return of_groups.repeat_interleave(self.group_inputs, 1)[:, : self.num_inputs]


def can_be_one(parts: Sequence[QuantizedWeight]) -> bool:
    """Return whether one weight can hold the outputs of all ``parts``, which share their rows."""
    first = parts[0]
    return all(
        part.codes.dtype == first.codes.dtype
        and part.bits == first.bits
        and part.scales.shape[1] == first.scales.shape[1]
        and part.group_inputs == first.group_inputs
        and part.activations == first.activations
        and part.activation_scale == first.activation_scale
        and (part.offsets is None) == (first.offsets is None)
        and part.code_zero == first.code_zero
        and _same(part.order, first.order)
        for part in parts[1:]
    )


def in_one_form(parts: Sequence[QuantizedWeight]) -> QuantizedWeight | None:
    """Join the outputs of ``parts``, with the same values; None if one weight cannot hold them.

    Parts for rows of int16 may differ in bits and groups: the joined weight has the most bits and
    the smallest groups of the parts, and offsets if any part has.
    """
    if can_be_one(parts):
        return as_one(parts)
    first = parts[0]
    alike = all(
        part.codes.dtype is torch.int8
        and part.zeros is None
        and part.activations is Activations.INT16_GROUP
        and part.num_inputs % part.group_inputs == 0
        and _same(part.order, first.order)
        for part in parts
    )
    if not alike:
        return None
    size = math.gcd(*(part.group_inputs for part in parts))
    bits = max(part.bits for part in parts)
    if any(part.code_zero for part in parts):
        # Codes from 0 on need another bit beside signed ones.
        largest = max(int(part.codes.max()) for part in parts)
        bits = next(more for more in (bits, bits + 1, _MOST_BITS) if largest < 1 << more - 1)
    has_offsets = any(part.offsets is not None for part in parts)
    return as_one([_in_form(part, bits, size, has_offsets=has_offsets) for part in parts])


def _in_form(
    weight: QuantizedWeight, bits: int, group_inputs: int, *, has_offsets: bool
) -> QuantizedWeight:
    repeats = weight.group_inputs // group_inputs
    scales = weight.scales.repeat_interleave(repeats, 1)
    offsets = torch.zeros_like(scales) if has_offsets else None
    if weight.offsets is not None:
        offsets = weight.offsets.repeat_interleave(repeats, 1)
    return replace(weight, scales=scales, offsets=offsets, bits=bits, group_inputs=group_inputs)


def as_one(parts: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """Join the outputs of ``parts``, for which ``can_be_one`` must hold."""
    zeros = None
    if any(part.zeros is not None for part in parts):
        zeros = torch.cat(
            [
                torch.zeros_like(p.scales, dtype=torch.int16) if p.zeros is None else p.zeros
                for p in parts
            ]
        )
    return replace(
        parts[0],
        codes=torch.cat([part.codes for part in parts]),
        scales=torch.cat([part.scales for part in parts]),
        zeros=zeros,
        offsets=_joined([part.offsets for part in parts]),
    )


def _joined(parts: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    given = [part for part in parts if part is not None]
    return torch.cat(given) if given else None


def _same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)

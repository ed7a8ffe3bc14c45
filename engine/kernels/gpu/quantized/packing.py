"""Layout of quantized weights in a device's memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch

from millrace.engine.kernels.operations import WeightSize

# Most inputs that a product takes at a time: the usual size of a group.
_MOST_CHUNK = 128


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """Weights [num_outputs, num_inputs], each (code - zero) * scale + offset.

    ``codes`` is int8 or float8_e4m3fn [num_outputs, num_inputs], or uint8 [num_outputs, num_inputs
    / 2]. In the latter, byte j of each ``chunk`` / 2 bytes has the code of input j of ``chunk``
    inputs in its low bits and the code of input j + ``chunk`` / 2 in its high bits, both plus 8.
    ``scales`` is a float type [num_groups, num_outputs]; ``zeros`` is int16 of that shape or None,
    and ``offsets`` a float type of that shape or None. A group has ``group_inputs`` inputs; 0 means
    a single group. In a stack, all tensors have a leading dimension of experts.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    group_inputs: int
    chunk: int
    offsets: torch.Tensor | None = None

    def __len__(self) -> int:
        """Return the number of experts in a stack."""
        return len(self.codes)

    @property
    def is_packed(self) -> bool:
        """True if a byte has two codes."""
        return self.codes.dtype is torch.uint8

    @property
    def num_outputs(self) -> int:
        return self.codes.shape[-2]

    @property
    def num_inputs(self) -> int:
        return self.codes.shape[-1] * (1 + self.is_packed)

    @property
    def size(self) -> WeightSize:
        parts = (self.codes, self.scales, self.zeros, self.offsets)
        num_bytes = sum(part.numel() * part.itemsize for part in parts if part is not None)
        return WeightSize(self.codes.numel() * (1 + self.is_packed), num_bytes)

    @classmethod
    def of(
        cls,
        codes: torch.Tensor,
        scales: torch.Tensor,
        zeros: torch.Tensor | None = None,
        offsets: torch.Tensor | None = None,
        *,
        group_inputs: int,
        bits: int,
    ) -> Self:
        """Pack ``codes`` [num_outputs, num_inputs] with what belongs to them, on their device.

        Codes of 4 ``bits`` are from -8 to 7. ``scales``, ``zeros`` and ``offsets`` are
        [num_outputs, num_groups].

        Raises:
            ValueError: ``chunk_of`` finds no chunk for the width.
        """
        one_group = scales.shape[1] == 1 and offsets is None
        group_inputs = 0 if one_group else group_inputs
        chunk = chunk_of(codes.shape[1], group_inputs, bits)
        if not chunk:
            raise ValueError(f"{codes.shape[1]} inputs in groups of {group_inputs} have no chunks")
        return cls(
            codes=_packed(codes, chunk) if bits == 4 else codes.contiguous(),
            scales=_narrowed(scales).t().contiguous(),
            zeros=None if zeros is None else zeros.t().contiguous(),
            group_inputs=group_inputs,
            chunk=chunk,
            offsets=None if offsets is None else _narrowed(offsets).t().contiguous(),
        )

    @classmethod
    def stacked(cls, weights: Sequence[Self]) -> Self:
        """Stack the weights of several experts. Raises ValueError if their layouts differ."""
        first = weights[0]
        for other in weights[1:]:
            if (
                (other.codes.shape, other.codes.dtype) != (first.codes.shape, first.codes.dtype)
                or other.group_inputs != first.group_inputs
                or other.scales.shape != first.scales.shape
                or (other.offsets is None) != (first.offsets is None)
            ):
                raise ValueError("the weights of experts in one stack differ in their layout")
        scales = torch.stack([weight.scales.float() for weight in weights])
        zeros = None
        if any(weight.zeros is not None for weight in weights):
            zeros = torch.stack(
                [
                    torch.zeros_like(weight.scales, dtype=torch.int16)
                    if weight.zeros is None
                    else weight.zeros
                    for weight in weights
                ]
            )
        offsets = [weight.offsets.float() for weight in weights if weight.offsets is not None]
        # Stacked as bytes: some versions of torch cannot concatenate float8.
        codes = torch.stack([weight.codes.view(torch.uint8) for weight in weights])
        return replace(
            first,
            codes=codes.view(first.codes.dtype),
            scales=_narrowed(scales),
            zeros=zeros,
            offsets=_narrowed(torch.stack(offsets)) if offsets else None,
        )


def chunk_of(num_inputs: int, group_inputs: int, bits: int) -> int:
    """Return the number of inputs that a product takes at a time, a power of two.

    All are of one group of ``group_inputs`` (0 means a single group). Returns 0 if no chunk suits
    the matrix units, which take at least 16 inputs, and two halves of 16 with 4 ``bits``.
    """
    chunk = _MOST_CHUNK
    while num_inputs % chunk or group_inputs % chunk:
        chunk //= 2
    return chunk if chunk >= (32 if bits == 4 else 16) else 0


def _packed(codes: torch.Tensor, chunk: int) -> torch.Tensor:
    halves = (codes + 8).view(torch.uint8).view(len(codes), -1, 2, chunk // 2)
    return (halves[:, :, 0] | halves[:, :, 1] << 4).flatten(1)


def _narrowed(scales: torch.Tensor) -> torch.Tensor:
    """Narrow ``scales`` to the fewest bytes that are exact: most checkpoints store 16 bits."""
    if scales.is_meta:
        return scales
    for dtype in (torch.bfloat16, torch.float16):
        narrow = scales.to(dtype)
        if torch.equal(narrow.float(), scales):
            return narrow
    return scales

"""Tolerance of a kernel against its reference, and poisoned memory that must not be read."""

from __future__ import annotations

import torch

# Both compute in float32 and round once; they differ in the order of sums.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
DTYPES = tuple(TOLERANCE)


def assert_close(result: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[expected.dtype]
    torch.testing.assert_close(result, expected, atol=tolerance, rtol=tolerance)


def poisoned(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Return memory in which unwritten elements show."""
    if dtype is torch.float8_e4m3fn:
        return torch.full(shape, 0x7F, dtype=torch.uint8).view(dtype)
    return torch.full(shape, torch.nan, dtype=dtype)

"""Norms and gates of rows."""

from __future__ import annotations

import torch


def rms_norm(rows: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """See ``engine.kernels.gpu.rows``."""
    values = rows.float()
    scales = torch.rsqrt(values.square().mean(-1, keepdim=True) + epsilon)
    return (values * scales * weight.float()).to(rows.dtype)


def add_rms_norm(
    total: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> torch.Tensor:
    """See ``engine.kernels.gpu.rows``."""
    total.copy_(total.float() + delta.float())
    return rms_norm(total, weight, epsilon)


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """See ``engine.kernels.gpu.rows``."""
    gate, up = gate_up.float().chunk(2, -1)
    return (gate * torch.sigmoid(gate) * up).to(gate_up.dtype)

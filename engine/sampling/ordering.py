"""Sorting rows: numpy sorts a row of floats with vector instructions, torch on a CPU does not."""

from __future__ import annotations

import numpy as np
import torch


def ascending(values: torch.Tensor) -> torch.Tensor:
    """Each row in rising order; NaNs are not expected."""
    if values.device.type != "cpu":
        return values.sort(dim=-1).values
    return torch.from_numpy(np.sort(values.numpy(), axis=-1))


def smallest(values: torch.Tensor, count: int) -> torch.Tensor:
    """The ``count`` smallest of each row, or as many as it has, in rising order."""
    count = min(count, values.shape[1])
    if values.device.type != "cpu":
        return values.topk(count, dim=-1, largest=False).values
    parted = np.partition(values.numpy(), count - 1, axis=-1)[:, :count]
    return torch.from_numpy(np.sort(parted, axis=-1))


def ascending_order(values: torch.Tensor) -> torch.Tensor:
    """The indices (int64) that put each row in rising order. Rows that fall first and then rise
    are merely merged on a CPU."""
    if values.device.type != "cpu":
        return values.argsort(dim=-1)
    return torch.from_numpy(np.argsort(values.numpy(), axis=-1, kind="stable"))

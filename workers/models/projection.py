"""Linear maps of rows."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)


class Projection(NamedTuple):
    """A linear map. ``weight``: [num_outputs, num_inputs]; ``bias``: [num_outputs]."""

    weight: torch.Tensor
    bias: torch.Tensor | None


def project(rows: torch.Tensor, projection: Projection) -> torch.Tensor:
    """[num_rows, num_inputs] to [num_rows, num_outputs]."""
    return F.linear(rows, projection.weight, projection.bias)


def project_onto_(total: torch.Tensor, rows: torch.Tensor, projection: Projection) -> None:
    """Add the projection of ``rows`` to ``total`` in place."""
    total.addmm_(rows, projection.weight.t())
    if projection.bias is not None:
        total.add_(projection.bias)

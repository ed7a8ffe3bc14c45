"""Linear layers of which each rank of a group has some of the inputs."""

from __future__ import annotations

import torch

from millrace.engine.kernels.operations import Collectives, Linear, SwiGLU, WeightSize


class ReducedLinear:
    """A linear map that is the sum of what the ranks' own ``linear`` make of their inputs; all
    ranks of ``collectives`` call it at once, and have the same result. A bias is rank 0's."""

    def __init__(self, linear: Linear, collectives: Collectives) -> None:
        self.linear = linear
        self.collectives = collectives

    @property
    def size(self) -> WeightSize:
        """Of this rank's part."""
        return self.linear.size

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """[num_rows, inputs of this rank] to [num_rows, num_outputs]."""
        part = self.linear(rows)
        self.collectives.all_reduce(part)
        return part

    def plus(self, total: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """``total`` [num_rows, num_outputs] and the product; ``total`` may be overwritten."""
        return total.add_(self(rows))

    def plus_parts(self, total: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        """``total`` and the sum of the ranks' parts, of which this rank's is ``part``, a contiguous
        [num_rows, num_outputs]; both may be overwritten."""
        self.collectives.all_reduce(part)
        return total.add_(part)

    def gated(self, rows: torch.Tensor, swiglu: SwiGLU) -> torch.Tensor:
        """``swiglu`` of the product."""
        return swiglu(self(rows))

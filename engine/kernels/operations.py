"""Interface of kernels to a decoder: matrix products and the operations between them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from functools import reduce
from typing import NamedTuple, Protocol, TypeVar

import torch

BatchT_contra = TypeVar("BatchT_contra", bound="TokenBatch", contravariant=True)
MetadataT = TypeVar("MetadataT")
# Computes silu(gate) * up: [num_rows, width] of [num_rows, 2 * width], the gates first.
SwiGLU = Callable[[torch.Tensor], torch.Tensor]


class TokenBatch(Protocol):
    """Input of a step for a decoder: ``token_ids`` and ``positions``, int64 [num_tokens]."""

    @property
    def token_ids(self) -> torch.Tensor: ...

    @property
    def positions(self) -> torch.Tensor: ...


class WeightSize(NamedTuple):
    """Size of weights: their number, and the bytes that a product reads, including scales.

    Biases are not counted.
    """

    num_weights: int
    num_bytes: int

    @classmethod
    def of(cls, weight: torch.Tensor) -> WeightSize:
        """Return the size of a wide weight."""
        return cls(weight.numel(), weight.numel() * weight.element_size())

    def plus(self, other: WeightSize) -> WeightSize:
        return WeightSize(self.num_weights + other.num_weights, self.num_bytes + other.num_bytes)


def total_size(sizes: Iterable[WeightSize]) -> WeightSize:
    """Return the sum of sizes."""
    return reduce(WeightSize.plus, sizes, WeightSize(0, 0))


class Linear(ABC):
    """Linear map of rows."""

    size: WeightSize

    @abstractmethod
    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Multiply [num_rows, num_inputs] to [num_rows, num_outputs]."""

    @abstractmethod
    def unrounded(self, rows: torch.Tensor) -> torch.Tensor:
        """Multiply as a call does, and return the sums in float32 without rounding."""

    def plus(self, total: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return ``total`` [num_rows, num_outputs] plus the product; may overwrite ``total``.

        ``total`` has the dtype of ``rows``, or is float32.
        """
        return total.add_(self(rows))

    def gated(self, rows: torch.Tensor, swiglu: SwiGLU) -> torch.Tensor:
        """Return ``swiglu`` of the product."""
        return swiglu(self(rows))


class Collectives(Protocol):
    """Collectives of a group of ranks, which all make the same calls in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int:
        """Number of ranks."""

    def all_reduce(self, rows: torch.Tensor) -> None:
        """Replace contiguous ``rows`` by their sum over the ranks: the same bits on every rank.

        Sums are in float32 and rounded once.
        """


class Rotation(NamedTuple):
    """Rotation (RoPE) of each token: float32 [num_tokens, head_dim / 2].

    Element i of a head pairs with element i + head_dim / 2.
    """

    cosines: torch.Tensor
    sines: torch.Tensor


class HeadNorms(NamedTuple):
    """Weights of the RMSNorm of each query and of each key head: [head_dim]."""

    query: torch.Tensor
    key: torch.Tensor


class Operations(Protocol[BatchT_contra, MetadataT]):
    """Operations of a decoder besides matrix products; implementations call the kernels."""

    @property
    def has_wide_residual(self) -> bool:
        """True if the residual stream is float32, False if it has the weights' dtype."""

    def prepare(self, batch: BatchT_contra, rotation: Rotation) -> MetadataT:
        """Compute the parts of a step that are the same in all layers."""

    def rms_norm(self, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Divide ``rows`` [num_rows, width] by their root mean square, times ``weight`` [width].

        ``rows`` are of the residual stream; the result has the weight's dtype.
        """

    def add_norm(
        self, total: torch.Tensor, rows: torch.Tensor, linear: Linear, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``total`` plus the product of ``rows``, and the RMSNorm of that by ``weight``.

        May overwrite ``total``.
        """

    def swiglu(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Compute silu(gate) * up: [num_rows, width] of [num_rows, 2 * width], the gates first."""

    def attend(
        self, layer: int, heads: torch.Tensor, norms: HeadNorms | None, metadata: MetadataT
    ) -> torch.Tensor:
        """Norm and rotate query and key heads, store keys and values, and attend causally.

        A layer with a sliding window attends to the last tokens only. ``heads`` is contiguous
        [num_tokens, num_heads + 2 * num_kv_heads, head_dim], queries first, then keys, then values;
        it may be overwritten. Returns [num_tokens, num_heads * head_dim].
        """

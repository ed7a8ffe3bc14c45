"""What a decoder needs of kernels: matrix products, and the operations between them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from functools import reduce
from typing import NamedTuple, Protocol, TypeVar

import torch

BatchT_contra = TypeVar("BatchT_contra", bound="TokenBatch", contravariant=True)
MetadataT = TypeVar("MetadataT")
# silu(gate) * up: [num_rows, width] of [num_rows, 2 * width], the gates first.
SwiGLU = Callable[[torch.Tensor], torch.Tensor]


class TokenBatch(Protocol):
    """What a decoder itself reads of a step's input: ``token_ids`` and ``positions``, int64
    [num_tokens]."""

    @property
    def token_ids(self) -> torch.Tensor: ...

    @property
    def positions(self) -> torch.Tensor: ...


class WeightSize(NamedTuple):
    """Of weights: how many there are, and how many bytes a product reads of them, scales included;
    biases are not counted."""

    num_weights: int
    num_bytes: int

    @classmethod
    def of(cls, weight: torch.Tensor) -> WeightSize:
        """Of a wide weight."""
        return cls(weight.numel(), weight.numel() * weight.element_size())

    def plus(self, other: WeightSize) -> WeightSize:
        return WeightSize(self.num_weights + other.num_weights, self.num_bytes + other.num_bytes)


def total_size(sizes: Iterable[WeightSize]) -> WeightSize:
    """That of all together."""
    return reduce(WeightSize.plus, sizes, WeightSize(0, 0))


class Linear(ABC):
    """A matrix product of rows."""

    size: WeightSize

    @abstractmethod
    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """[num_rows, num_inputs] to [num_rows, num_outputs]."""

    def plus(self, total: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """``total`` [num_rows, num_outputs] and the product; ``total`` may be overwritten."""
        return total.add_(self(rows))

    def gated(self, rows: torch.Tensor, swiglu: SwiGLU) -> torch.Tensor:
        """``swiglu`` of the product."""
        return swiglu(self(rows))


class Collectives(Protocol):
    """What the ranks of a group exchange numbers by. All of them make the same calls in the same
    order."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int:
        """How many ranks there are."""

    def all_reduce(self, rows: torch.Tensor) -> None:
        """Replace contiguous ``rows`` by their sum over the ranks: the same bits on every rank.
        Sums are in float32 and rounded once."""


class Rotation(NamedTuple):
    """RoPE of each token: float32 [num_tokens, head_dim / 2]; element i of a head pairs with
    i + head_dim / 2."""

    cosines: torch.Tensor
    sines: torch.Tensor


class HeadNorms(NamedTuple):
    """Weights of the RMSNorm of each query and of each key head: [head_dim]."""

    query: torch.Tensor
    key: torch.Tensor


class Operations(Protocol[BatchT_contra, MetadataT]):
    """What a decoder needs besides matrix products; the place where kernels come in."""

    def prepare(self, batch: BatchT_contra, rotation: Rotation) -> MetadataT:
        """Everything about a step that is the same in all layers."""

    def rms_norm(self, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """``rows`` [num_rows, width] over their root mean square, times ``weight`` [width]."""

    def add_norm(
        self, total: torch.Tensor, rows: torch.Tensor, linear: Linear, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``total`` and the product of ``rows``, and the RMSNorm of that by ``weight``; ``total``
        may be overwritten."""

    def swiglu(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up: [num_rows, width] of [num_rows, 2 * width], the gates first."""

    def attend(
        self, layer: int, heads: torch.Tensor, norms: HeadNorms | None, metadata: MetadataT
    ) -> torch.Tensor:
        """Norm query and key heads, rotate them, store keys and values in the KV cache, and attend
        causally over all of them, or over the last of them in a layer with a sliding window.

        ``heads``: [num_tokens, num_heads + 2 * num_kv_heads, head_dim], contiguous, queries first,
        then keys, then values; may be overwritten. Returns [num_tokens, num_heads * head_dim].
        """

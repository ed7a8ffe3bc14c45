"""Kernels of a device step from one of two sources: Triton or plain torch."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch

from millrace.engine.kernels.gpu.device_batch import CacheLayer, DeviceBatch
from millrace.engine.kernels.gpu.sorted_choices import SortedChoices
from millrace.engine.kernels.operations import WeightSize
from millrace.schemas.errors import ConfigError


class Attention(Protocol):
    """Attention over the paged cache."""

    def prepare(self, batch: DeviceBatch) -> Any:
        """Compute the parts of a step that are the same in all layers."""

    def attend(
        self,
        layer: int,
        queries: torch.Tensor,
        cache: CacheLayer,
        batch: DeviceBatch,
        work: Any,
        out: torch.Tensor,
    ) -> None:
        """Write the attention of ``queries`` [num_tokens, num_heads, head_dim] to ``out``."""


class ExpertKernels(Protocol):
    """Interface of both modules ``experts``, see ``engine.kernels.gpu.experts``."""

    def route(
        self, scores: torch.Tensor, num_chosen: int, *, normalized: bool
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    def products(
        self,
        rows: torch.Tensor,
        stack: torch.Tensor,
        choices: SortedChoices,
        *,
        num_chosen: int,
        weights: torch.Tensor | None = None,
        fixed: bool = False,
    ) -> torch.Tensor: ...

    def add_choices(self, total: torch.Tensor, results: torch.Tensor) -> torch.Tensor: ...


class ExpertStack(Protocol):
    """Stack of one weight of each expert that is not a plain tensor.

    Its products are as in ``engine.kernels.gpu.experts``.
    """

    @property
    def size(self) -> WeightSize: ...

    def __len__(self) -> int:
        """Return the number of experts."""

    def products(
        self,
        rows: torch.Tensor,
        choices: SortedChoices,
        *,
        num_chosen: int,
        weights: torch.Tensor | None,
        fixed: bool,
    ) -> torch.Tensor: ...


# Experts' weights: a tensor [num_experts, num_outputs, num_inputs], or another stack.
Stack = torch.Tensor | ExpertStack


class KernelSet(NamedTuple):
    """Functions of tensors on one device.

    They are documented in ``engine.kernels.gpu``, in the modules ``inputs``, ``rows``, ``heads``,
    ``matmul``, ``attention``, ``experts`` and ``adapters``. Modules of ``reference`` have the same
    names. Triton's functions neither wait for the device nor read from it on the host.
    """

    name: str
    prepare_inputs: Callable[..., None]
    rms_norm: Callable[..., torch.Tensor]
    add_rms_norm: Callable[..., torch.Tensor]
    swiglu: Callable[[torch.Tensor], torch.Tensor]
    rotate_store: Callable[..., None]
    linear: Callable[..., torch.Tensor]
    gated_linear: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    prefers_skinny: Callable[[int, int, int], bool]
    attention: Callable[..., Attention]
    experts: ExpertKernels
    add_adapters: Callable[..., None]


def choose_kernels(name: str, device: torch.device) -> KernelSet:
    """Return the kernels "triton" or "reference". Raises ConfigError if Triton's cannot run."""
    if name == "reference":
        return _reference_kernels()
    if device.type != "cuda" and not is_interpreted():
        raise ConfigError(
            "engine.kernels is 'triton', which needs a CUDA device. With TRITON_INTERPRET=1 in the "
            "environment, its interpreter runs them on the CPU, very slowly."
        )
    return triton_kernels()


def is_interpreted() -> bool:
    """Return whether Triton's kernels run in its interpreter."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def triton_kernels() -> KernelSet:
    """Return the Triton kernels: compiled on a CUDA device, otherwise interpreted."""
    from millrace.engine.kernels.gpu import (
        adapters,
        attention,
        experts,
        heads,
        inputs,
        matmul,
        rows,
    )

    return KernelSet(
        name="triton",
        prepare_inputs=inputs.prepare_inputs,
        rms_norm=rows.rms_norm,
        add_rms_norm=rows.add_rms_norm,
        swiglu=rows.swiglu,
        rotate_store=heads.rotate_store,
        linear=matmul.linear,
        gated_linear=matmul.gated_linear,
        prefers_skinny=matmul.prefers_skinny,
        attention=attention.PagedAttention,
        experts=experts,
        add_adapters=adapters.add_adapters,
    )


def _reference_kernels() -> KernelSet:
    from millrace.engine.kernels.gpu.reference import attention, experts, operations

    return KernelSet(
        name="reference",
        prepare_inputs=operations.prepare_inputs,
        rms_norm=operations.rms_norm,
        add_rms_norm=operations.add_rms_norm,
        swiglu=operations.swiglu,
        rotate_store=operations.rotate_store,
        linear=operations.linear,
        gated_linear=operations.gated_linear,
        prefers_skinny=lambda *_: False,
        attention=attention.ReferenceAttention,
        experts=experts,
        add_adapters=operations.add_adapters,
    )

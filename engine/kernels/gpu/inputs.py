"""Inputs of a step, unpacked on the device; it inserts the tokens of the previous step."""

from __future__ import annotations

import torch
import triton

from millrace.engine.kernels.gpu.jit.inputs import prepare_inputs_kernel
from millrace.engine.kernels.gpu.step_inputs import StepInputs, StepShape, StepState

_WIDTH = 256


def prepare_inputs(
    packed: torch.Tensor,
    state: StepState,
    inputs: StepInputs,
    shape: StepShape,
    *,
    block_size: int,
) -> None:
    """Unpack ``packed`` (see ``PackedInputs``) into ``inputs``, both of ``shape``."""
    count = max(shape.num_tokens, shape.num_sequences + 1, shape.num_sampled)
    prepare_inputs_kernel[(triton.cdiv(count, _WIDTH),)](
        packed,
        *state,
        *inputs,
        shape.num_tokens,
        shape.num_sequences,
        shape.num_sampled,
        state.block_tables.stride(0),
        BLOCK_SIZE=block_size,
        WIDTH=_WIDTH,
    )

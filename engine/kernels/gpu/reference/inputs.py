"""A step's inputs, unpacked on the device; tokens of the last step are read there."""

from __future__ import annotations

import torch

from millrace.engine.kernels.gpu.step_inputs import PackedInputs, StepInputs, StepShape, StepState


def prepare_inputs(
    packed: torch.Tensor,
    state: StepState,
    inputs: StepInputs,
    shape: StepShape,
    *,
    block_size: int,
) -> None:
    """Unpack ``packed`` (see ``PackedInputs``) into ``inputs``, both of ``shape``."""
    given = PackedInputs.of(packed, shape)
    chosen = state.last_tokens[given.token_rows]
    inputs.token_ids.copy_(torch.where(given.token_ids < 0, chosen, given.token_ids).clamp(min=0))
    positions = given.positions.clamp(min=0)
    inputs.positions.copy_(positions)
    blocks = state.block_tables[given.token_rows, positions // block_size].long()
    slots = blocks * block_size + positions % block_size
    inputs.slots.copy_(torch.where(given.positions < 0, -1, slots))
    inputs.query_starts.copy_(given.query_starts)
    inputs.lengths.copy_(given.lengths)
    inputs.table_rows.copy_(given.table_rows)
    inputs.state_rows.copy_(given.state_rows)

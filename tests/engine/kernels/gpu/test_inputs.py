"""A step's inputs: the kernel against plain torch."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.engine.kernels.gpu import inputs as triton_inputs
from millrace.engine.kernels.gpu.reference import operations as reference_inputs
from millrace.engine.kernels.gpu.step_inputs import PackedInputs, StepInputs, StepShape, StepState

BLOCK_SIZE = 4
NUM_ROWS = 6
MAX_BLOCKS = 5
CPU = torch.device("cpu")

counts = st.integers(0, 300)


@settings(max_examples=25, deadline=None)
@given(counts, counts, counts, st.integers(0, 1 << 30))
def test_the_kernel_unpacks_like_plain_torch(
    num_tokens: int, num_sequences: int, num_sampled: int, seed: int
) -> None:
    shape = StepShape(0, num_tokens, num_sequences, num_sampled)
    generator = torch.Generator().manual_seed(seed)

    def drawn(low: int, high: int, *size: int) -> torch.Tensor:
        return torch.randint(low, high, size, generator=generator)

    packed = torch.empty(shape.num_packed, dtype=torch.int64)
    sections = PackedInputs.of(packed, shape)
    bounds = [
        *((-1, 99), (-1, MAX_BLOCKS * BLOCK_SIZE), (0, NUM_ROWS)),
        *((0, 999), (0, 999), (0, NUM_ROWS)),
        *((0, 999), (0, NUM_ROWS), (0, 999)),
    ]
    for section, (low, high) in zip(sections, bounds, strict=True):
        section.copy_(drawn(low, high, len(section)))
    state = StepState(
        last_tokens=drawn(-1, 99, NUM_ROWS),
        block_tables=drawn(0, 1 << 20, NUM_ROWS, MAX_BLOCKS).int(),
    )
    made = []
    for prepare in (triton_inputs.prepare_inputs, reference_inputs.prepare_inputs):
        inputs = StepInputs.empty(shape, CPU)
        for part in inputs:
            part.fill_(-77)
        prepare(packed, state, inputs, shape, block_size=BLOCK_SIZE)
        made.append(inputs)
    for ours, reference in zip(*made, strict=True):
        assert torch.equal(ours, reference)


def test_a_token_chosen_on_the_device_is_looked_up_and_padding_stores_nothing() -> None:
    shape = StepShape(3, 3, 3, 1)
    packed = torch.tensor([7, -1, 0, 5, 2, -1, 0, 1, 2, 0, 1, 2, 3, 6, 3, 0, 0, 1, 2, 1, 1, 4])
    state = StepState(torch.tensor([50, 51, 52]), torch.tensor([[8, 9], [3, 4], [0, 0]]).int())
    inputs = StepInputs.empty(shape, CPU)
    triton_inputs.prepare_inputs(packed, state, inputs, shape, block_size=BLOCK_SIZE)
    assert inputs.token_ids.tolist() == [7, 51, 0]
    assert inputs.positions.tolist() == [5, 2, 0]
    assert inputs.slots.tolist() == [9 * BLOCK_SIZE + 1, 3 * BLOCK_SIZE + 2, -1]
    assert inputs.query_starts.tolist() == [0, 1, 2, 3]
    assert inputs.lengths.tolist() == [6, 3, 0]
    assert inputs.state_rows.tolist() == [1]

"""Copies of blocks: every byte of the named ones, and no other."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.engine.kernels.gpu.blocks import copy_blocks

BLOCK_SHAPES = [(1,), (3,), (7, 5), (16, 2, 2, 8), (4104,), (2, 2, 2, 80)]


@settings(deadline=None, max_examples=40)
@given(
    num_layers=st.integers(1, 3),
    num_blocks=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    shape=st.sampled_from(BLOCK_SHAPES),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint8]),
    gap=st.integers(0, 2),
    data=st.data(),
)
def test_named_blocks_and_no_others(
    num_layers: int,
    num_blocks: tuple[int, int],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    gap: int,
    data: st.DataObject,
) -> None:
    def memory(count: int, space: int) -> torch.Tensor:
        """Return blocks of random bytes, in layers that lie ``space`` blocks apart."""
        size = (num_layers, count + space, *shape[:-1], shape[-1] * dtype.itemsize)
        return torch.randint(0, 256, size, dtype=torch.uint8).view(dtype)[:, :count]

    source, target = memory(num_blocks[0], gap), memory(num_blocks[1], 0)
    targets = data.draw(st.lists(st.integers(0, num_blocks[1] - 1), unique=True))
    sources = [data.draw(st.integers(0, num_blocks[0] - 1)) for _ in targets]
    ids = torch.tensor(sources, dtype=torch.int64), torch.tensor(targets, dtype=torch.int64)
    expected, before = target.clone(), source.clone()
    rows = source.flatten(2).view(torch.uint8)
    expected.flatten(2).view(torch.uint8)[:, ids[1]] = rows[:, ids[0]]
    copy_blocks(source, target, *ids)
    assert torch.equal(target.view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(source.view(torch.uint8), before.view(torch.uint8))
    for from_, to in zip(sources, targets, strict=True):
        assert torch.equal(target[:, to].view(torch.uint8), source[:, from_].view(torch.uint8))


def test_within_one_tensor() -> None:
    blocks = torch.randn(2, 5, 16, 2, 4, 8)
    before = blocks.clone()
    copy_blocks(blocks, blocks, torch.tensor([0, 0, 3]), torch.tensor([1, 4, 2]))
    assert torch.equal(blocks, before[:, [0, 0, 3, 3, 0]])


def test_offsets_past_32_bits() -> None:
    """Only the used pages of the memory exist."""
    far = 2**31 // 4096 + 1
    blocks = torch.empty(1, far + 1, 4096, dtype=torch.uint8)
    blocks[:, far], blocks[:, 0] = 7, 1
    copy_blocks(blocks, blocks, torch.tensor([far]), torch.tensor([0]))
    assert (blocks[:, 0] == 7).all()

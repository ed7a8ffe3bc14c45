"""Blocks that are split over other ranks at the lender than at the puller."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.engine.transfer.memory import BlockLayout, Blocks
from millrace.engine.transfer.reslicing import Reslicer
from millrace.engine.transfer.wire import PeerError
from millrace.schemas.transfer import BlockPart

NUM_BLOCKS = 5
Whole = npt.NDArray[np.uint8]


class Model(NamedTuple):
    """Keys and values of a model's blocks, [num_layers, num_blocks, num_tokens, 2, num_heads,
    bytes], and their scales, if any."""

    data: Whole
    scales: Whole | None

    @classmethod
    def of(cls, num_layers: int, layout: BlockLayout) -> Model:
        draw = np.random.default_rng(num_layers)
        shape = (num_layers, NUM_BLOCKS, layout.num_tokens, 2, layout.num_heads)

        def drawn(size: int) -> Whole:
            return draw.integers(0, 256, (*shape, size), dtype=np.uint8)

        return cls(
            drawn(layout.head_bytes), drawn(layout.scale_bytes) if layout.scale_bytes else None
        )

    def split(self, layout: BlockLayout, parts: list[BlockPart]) -> Blocks:
        """Return the blocks as they lie in the memory of ranks with these parts."""
        pieces = []
        for first_layer, num_layers, first_head, num_heads in map(_numbers, parts):
            layers = slice(first_layer, first_layer + num_layers)
            heads = slice(first_head, first_head + num_heads)
            piece = np.zeros((num_layers, NUM_BLOCKS, layout.size_bytes), np.uint8)
            data = self.data[layers, :, :, :, heads].reshape(num_layers, NUM_BLOCKS, -1)
            piece[:, :, : data.shape[2]] = data
            if self.scales is not None:
                scales = self.scales[layers, :, :, :, heads].reshape(num_layers, NUM_BLOCKS, -1)
                piece[:, :, layout.scales_at : layout.scales_at + scales.shape[2]] = scales
            pieces.append(piece)
        return np.concatenate(pieces)


def _numbers(part: BlockPart) -> tuple[int, int, int, int]:
    return part.first_layer, part.num_layers, part.first_head, part.num_heads


@st.composite
def partitions(draw: st.DrawFn, num_layers: int, num_heads: int) -> list[BlockPart]:
    """Draw a partition into stages of one layer or more, each with ranks of equally many heads, or
    with every head at several ranks."""
    cuts = draw(st.sets(st.integers(1, max(1, num_layers - 1)), max_size=num_layers - 1))
    ends = [0, *sorted(cuts - {num_layers}), num_layers]
    each = draw(st.sampled_from([n for n in range(1, num_heads + 1) if num_heads % n == 0]))
    copies = draw(st.integers(1, 2)) if each == 1 else 1
    return [
        BlockPart(begin, end - begin, head, each)
        for begin, end in itertools.pairwise(ends)
        for head in range(0, num_heads, each)
        for _ in range(copies)
    ]


@given(data=st.data())
def test_each_part_gets_what_it_has(data: st.DataObject) -> None:
    num_layers, num_heads = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 6))
    layout = BlockLayout(
        data.draw(st.integers(1, 5)),
        num_heads,
        data.draw(st.integers(1, 9)),
        scale_bytes=data.draw(st.sampled_from([0, 2, 4, 6])),
    )
    model = Model.of(num_layers, layout)
    own, theirs = (data.draw(partitions(num_layers, num_heads)) for _ in range(2))
    own_layout, their_layout = (
        layout._replace(num_heads=parts[0].num_heads) for parts in (own, theirs)
    )
    source, expected = model.split(their_layout, theirs), model.split(own_layout, own)
    reslicer = Reslicer(own_layout, own, theirs)
    assert reslicer.shape(NUM_BLOCKS) == source.shape
    target = np.zeros_like(expected)
    sources = data.draw(st.permutations(range(NUM_BLOCKS)))[:3]
    targets = data.draw(st.permutations(range(NUM_BLOCKS)))[:3]
    reslicer.copy(source, sources, target, targets)
    assert np.array_equal(target[:, targets], expected[:, sources])
    untouched = sorted({*range(NUM_BLOCKS)} - {*targets})
    assert not target[:, untouched].any()


@pytest.mark.parametrize(
    ("theirs", "why"),
    [
        ([BlockPart(0, 3, 0, 2)], "lack layers or heads"),
        ([BlockPart(0, 4, 0, 1)], "lack layers or heads"),
        ([BlockPart(1, 4, 0, 2)], "lack layers or heads"),
        ([BlockPart(0, 4, 0, 2), BlockPart(0, 4, 0, 1)], "an invalid way"),
        ([BlockPart(0, 4, 0, 0)], "an invalid way"),
        ([BlockPart(-1, 5, 0, 2)], "an invalid way"),
        ([], "an invalid way"),
    ],
)
def test_parts_that_lack_something_or_are_none_are_refused(
    theirs: list[BlockPart], why: str
) -> None:
    with pytest.raises(PeerError, match=why):
        Reslicer(BlockLayout(4, 2, 8, scale_bytes=0), [BlockPart(0, 4, 0, 2)], theirs)

"""Reslicing of blocks between models that are split over ranks in different ways."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from millrace.engine.transfer.memory import BlockLayout, Blocks, BlockShape
from millrace.engine.transfer.wire import PeerError
from millrace.schemas.transfer import BlockPart


class _Move(NamedTuple):
    """Layers and heads that a part there and a part here have in common, as slices of each."""

    their_layers: slice
    their_heads: slice
    own_layers: slice
    own_heads: slice


class Reslicer:
    """Copier of blocks from memory split into the parts ``theirs`` to memory split into ``own``.

    In either memory, parts follow each other and have equally many heads. A head that several parts
    have is taken from the first of them.
    """

    def __init__(
        self, layout: BlockLayout, own: Sequence[BlockPart], theirs: Sequence[BlockPart]
    ) -> None:
        """Plan the copies; ``layout`` is that of own blocks.

        Raises PeerError if parts are invalid, or if their parts lack layers or heads of own parts.
        """
        _check(own)
        _check(theirs)
        self._own = layout
        self._theirs = layout._replace(num_heads=theirs[0].num_heads)
        self._num_their_layers = sum(part.num_layers for part in theirs)
        self._moves = [move for part in _placed(own) for move in _moves_to(part, _placed(theirs))]

    def shape(self, num_blocks: int) -> BlockShape:
        """Return the shape of ``num_blocks`` blocks there."""
        return BlockShape(self._num_their_layers, num_blocks, self._theirs.size_bytes)

    def copy(
        self, source: Blocks, sources: Sequence[int], target: Blocks, targets: Sequence[int]
    ) -> None:
        """Copy blocks ``sources`` there to ``targets`` here, one for one, in all layers."""
        views = zip(self._theirs.vectors(source), self._own.vectors(target), strict=True)
        for from_, to in views:
            for their_layers, their_heads, own_layers, own_heads in self._moves:
                taken = from_[their_layers, sources]
                to[own_layers, targets, :, :, own_heads] = taken[:, :, :, :, their_heads]


class _Placed(NamedTuple):
    """Part, and the index of its first layer among the layers of all parts."""

    part: BlockPart
    first_row: int


def _check(parts: Sequence[BlockPart]) -> None:
    """Raise PeerError unless these can be parts of a model."""
    bad = [part for part in parts if min(part.num_layers, part.num_heads) < 1]
    bad += [part for part in parts if min(part.first_layer, part.first_head) < 0]
    if bad or len({part.num_heads for part in parts}) != 1:
        raise PeerError("its blocks are split in an invalid way")


def _placed(parts: Sequence[BlockPart]) -> list[_Placed]:
    placed, row = [], 0
    for part in parts:
        placed.append(_Placed(part, row))
        row += part.num_layers
    return placed


def _moves_to(own: _Placed, theirs: list[_Placed]) -> list[_Move]:
    """Return the copies for an own part. Raises PeerError if their parts lack some of it."""
    moves: list[_Move] = []
    part = own.part
    missing = np.ones((part.num_layers, part.num_heads), np.bool_)
    for other, first_row in theirs:
        layers = _common((part.first_layer, part.num_layers), (other.first_layer, other.num_layers))
        heads = _common((part.first_head, part.num_heads), (other.first_head, other.num_heads))
        own_layers, own_heads = _at(layers, part.first_layer), _at(heads, part.first_head)
        if not missing[own_layers, own_heads].any():
            continue
        missing[own_layers, own_heads] = False
        moves.append(
            _Move(
                _at(layers, other.first_layer - first_row),
                _at(heads, other.first_head),
                _at(layers, part.first_layer - own.first_row),
                own_heads,
            )
        )
    if missing.any():
        raise PeerError("its blocks lack layers or heads that are here")
    return moves


def _common(one: tuple[int, int], other: tuple[int, int]) -> range:
    """Return the intersection of two ranges, each given by its first number and its length."""
    begin = max(one[0], other[0])
    return range(begin, max(begin, min(one[0] + one[1], other[0] + other[1])))


def _at(numbers: range, first: int) -> slice:
    """Return the slice of ``numbers`` in a sequence that begins with ``first``."""
    return slice(numbers.start - first, numbers.stop - first)

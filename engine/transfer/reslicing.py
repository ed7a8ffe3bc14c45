"""Blocks of a model that is split over other ranks than here: which bytes of them are whose."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from millrace.engine.transfer.memory import BlockLayout, Blocks, BlockShape
from millrace.engine.transfer.wire import PeerError
from millrace.schemas.transfer import BlockPart


class _Move(NamedTuple):
    """Layers and heads that a part there and a part here have in common, by their places in
    each."""

    their_layers: slice
    their_heads: slice
    own_layers: slice
    own_heads: slice


class Reslicer:
    """Copies blocks from memory in which they are split into the parts ``theirs`` to memory in
    which they are split into ``own`` ones; in either, parts lie one behind the other and have
    equally many heads each.

    A head that several parts have is taken from the first of them.
    """

    def __init__(
        self, layout: BlockLayout, own: Sequence[BlockPart], theirs: Sequence[BlockPart]
    ) -> None:
        """``layout`` is that of the blocks here. Raises PeerError for parts that lack something of
        what is here, or are none."""
        _check(own)
        _check(theirs)
        self._own = layout
        self._theirs = layout._replace(num_heads=theirs[0].num_heads)
        self._num_their_layers = sum(part.num_layers for part in theirs)
        self._moves = [move for part in _placed(own) for move in _moves_to(part, _placed(theirs))]

    def shape(self, num_blocks: int) -> BlockShape:
        """That of so many blocks there."""
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
    """A part, and the place of its first layer among those of all parts."""

    part: BlockPart
    first_row: int


def _check(parts: Sequence[BlockPart]) -> None:
    """Raise PeerError unless these can be parts of a model."""
    bad = [part for part in parts if min(part.num_layers, part.num_heads) < 1]
    bad += [part for part in parts if min(part.first_layer, part.first_head) < 0]
    if bad or len({part.num_heads for part in parts}) != 1:
        raise PeerError("its blocks are split in a way that makes no sense")


def _placed(parts: Sequence[BlockPart]) -> list[_Placed]:
    placed, row = [], 0
    for part in parts:
        placed.append(_Placed(part, row))
        row += part.num_layers
    return placed


def _moves_to(own: _Placed, theirs: list[_Placed]) -> list[_Move]:
    """Of all that a part here has. Raises PeerError if the parts there lack some of it."""
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
    """What two ranges have in common, each given by its first number and its length."""
    begin = max(one[0], other[0])
    return range(begin, max(begin, min(one[0] + one[1], other[0] + other[1])))


def _at(numbers: range, first: int) -> slice:
    """Where these numbers are in what begins with ``first``."""
    return slice(numbers.start - first, numbers.stop - first)

"""Copies of blocks, neighbours at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from millrace.engine.transfer.memory import Blocks


class BlockRun(NamedTuple):
    """``length`` neighbouring blocks."""

    source: int
    target: int
    length: int


def runs_of(sources: list[int], targets: list[int]) -> list[BlockRun]:
    """The pairs by rising target, with neighbours that stay neighbours taken together."""
    runs: list[BlockRun] = []
    for to, from_ in sorted(zip(targets, sources, strict=True)):
        if runs:
            source, target, count = runs[-1]
            if to == target + count and from_ == source + count:
                runs[-1] = BlockRun(source, target, count + 1)
                continue
        runs.append(BlockRun(from_, to, 1))
    return runs


def shares_of(runs: list[BlockRun], num_blocks: int, num_shares: int) -> list[list[BlockRun]]:
    """The runs, cut where need be, in shares of about equally many blocks."""
    size = -(-num_blocks // num_shares)
    shares: list[list[BlockRun]] = [[]]
    room = size
    for run in runs:
        for part in cut(run, size, room):
            if room == 0:
                shares.append([])
                room = size
            shares[-1].append(part)
            room -= part.length
    return shares


def cut(run: BlockRun, size: int, first: int = 0) -> Iterator[BlockRun]:
    """A run in pieces of ``size`` at most, the first of them of ``first`` if that is above 0."""
    source, target, count = run
    room = first or size
    while count:
        part = min(count, room)
        yield BlockRun(source, target, part)
        source, target, count, room = source + part, target + part, count - part, size


def copy_runs(source: Blocks, target: Blocks, runs: list[BlockRun]) -> None:
    """Copy runs of blocks in all layers."""
    for from_, to, count in runs:
        target[:, to : to + count] = source[:, from_ : from_ + count]

"""Watermark of the outbox: all records below it have landed, in any order."""

from __future__ import annotations

import random

import pytest

from millrace.telemetry.store.outbox_ledger import OutboxLedger, merge
from millrace.telemetry.store.store import Store


@pytest.mark.parametrize(
    ("ranges", "mark"),
    [
        ([], 0),
        ([(2, 9)], 0),
        ([(1, 1)], 1),
        ([(1, 3), (5, 9)], 3),
        ([(1, 3), (4, 9)], 9),
        ([(1, 9), (2, 3), (10, 12)], 12),
        ([(1, 9), (2, 3), (11, 12), (14, 20)], 9),
        ([(5, 6), (1, 2), (3, 4)], 6),
    ],
)
async def test_the_watermark_follows_landed_and_void_ranges(
    store: Store, ranges: list[tuple[int, int]], mark: int
) -> None:
    ledger = OutboxLedger(store)
    assert await ledger.is_empty()
    for first, last in ranges:
        await ledger.void(first, last)
    assert await ledger.mark() == mark
    assert await ledger.is_empty() == (not ranges)


async def test_sequences_in_any_order_and_compacted_on_the_way(store: Store) -> None:
    ledger = OutboxLedger(store)
    draw = random.Random(3)
    left = list(range(1, 401))
    draw.shuffle(left)
    landed: set[int] = set()
    while left:
        batch, left = left[:40], left[40:]
        await ledger.add(batch)
        landed.update(batch)
        if draw.random() < 0.4:
            await ledger.compact()
        first, *_ = merge((sequence, sequence) for sequence in landed)
        assert await ledger.mark() == (first[1] if first[0] == 1 else 0)
    await ledger.compact()
    assert await store.rows("SELECT first_sequence, last_sequence FROM outbox_ledger FINAL") == [
        (1, 400)
    ]

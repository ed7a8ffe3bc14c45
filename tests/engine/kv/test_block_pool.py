"""The pool never loses a block and never gives one away twice."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.engine.kv.block_pool import BlockPool


def test_sizes() -> None:
    pool = BlockPool(5, 16)
    assert pool.capacity_tokens == 80
    assert [pool.blocks_for(n) for n in (0, 1, 16, 17)] == [0, 1, 1, 2]


def test_allocation_is_all_or_nothing() -> None:
    pool = BlockPool(3, 16)
    held = pool.allocate(2)
    assert held is not None
    assert pool.allocate(2) is None
    assert pool.num_free_blocks == 1
    assert pool.allocate(0) == []
    pool.free(held)
    assert pool.num_free_blocks == 3


def test_a_shared_block_is_free_after_its_last_holder() -> None:
    pool = BlockPool(1, 16)
    held = pool.allocate(1)
    assert held is not None
    pool.share(held[0])
    pool.free(held)
    assert pool.num_free_blocks == 0
    pool.free(held)
    assert pool.num_free_blocks == 1


def test_misuse_is_an_error() -> None:
    pool = BlockPool(1, 16)
    with pytest.raises(ValueError, match="twice"):
        pool.free([0])
    with pytest.raises(ValueError, match="cannot be shared"):
        pool.share(0)
    with pytest.raises(ValueError, match="at least one token"):
        BlockPool(0, 16)


@given(
    num_blocks=st.integers(1, 12),
    operations=st.lists(
        st.tuples(st.sampled_from(["allocate", "share", "free"]), st.integers(0, 5)), max_size=60
    ),
)
def test_pool_stays_consistent_over_any_history(
    num_blocks: int, operations: list[tuple[str, int]]
) -> None:
    pool = BlockPool(num_blocks, 16)
    held: list[int] = []  # one entry a reference
    for operation, amount in operations:
        if operation == "allocate":
            blocks = pool.allocate(amount)
            assert (blocks is None) == (amount > num_blocks - len(set(held)))
            held += blocks or []
        elif held and operation == "share":
            block = held[amount % len(held)]
            pool.share(block)
            held.append(block)
        elif held:
            pool.free([held.pop(amount % len(held))])
        pool.check_integrity()
        assert pool.num_free_blocks == num_blocks - len(set(held))
        assert all(pool.num_references(b) == held.count(b) for b in range(num_blocks))

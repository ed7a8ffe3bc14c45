"""Exchanges of ranks on devices, over Gloo as on a CPU: ranks are threads here."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from millrace.engine.kernels.ranks import RanksFailedError
from millrace.engine.parallel.control import NetworkPlace
from millrace.engine.parallel.device_ranks import DeviceRanks
from millrace.engine.parallel.rendezvous import Rendezvous
from millrace.registry.checkpoints.shard import Shard, vocabulary_range
from tests.engine.parallel.places import Places, folder_places
from tests.support.servers import free_port

CPU = torch.device("cpu")


def on_all(size: int, work: Callable[[int], Any]) -> list[Any]:
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(work, range(size)))


def met(
    places: Places, size: int, *, fixed: bool = False, timeout_s: float = 30.0
) -> list[DeviceRanks]:
    def meet(rank: int) -> DeviceRanks:
        place = places(rank)
        return DeviceRanks(place, CPU, Shard(rank, size), fixed=fixed, timeout_s=timeout_s)

    return on_all(size, meet)


def drawn(rank: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(7, 33, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("size", "fixed"), [(2, False), (4, False), (5, True)])
def test_sums_are_in_the_order_of_the_ranks_and_rounded_once(
    places: Places, size: int, fixed: bool, dtype: torch.dtype
) -> None:
    ranks = met(places, size, fixed=fixed)

    def reduce(rank: int) -> torch.Tensor:
        rows = drawn(rank, dtype)
        ranks[rank].all_reduce(rows)
        return rows

    total = drawn(0, dtype).float()
    for rank in range(1, size):
        total += drawn(rank, dtype).float()
    for rows in on_all(size, reduce):
        assert torch.equal(rows, total.to(dtype))


def test_sums_of_many_ranks_are_rounded_once_in_whatever_order(places: Places) -> None:
    ranks = met(places, 5)

    def reduce(rank: int) -> torch.Tensor:
        rows = drawn(rank, torch.bfloat16)
        ranks[rank].all_reduce(rows)
        return rows

    first, *others = on_all(5, reduce)
    total = sum(drawn(rank, torch.bfloat16).double() for rank in range(5))
    torch.testing.assert_close(first.double(), total, rtol=2**-8, atol=1e-6)
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("vocab_size", [96, 91, 203])
def test_columns_of_all_ranks_come_together_on_rank_0(places: Places, vocab_size: int) -> None:
    """The last rank may have fewer columns."""
    ranks = met(places, 3)
    whole = torch.randn(4, vocab_size)

    def gather(rank: int) -> torch.Tensor | None:
        own = vocabulary_range(vocab_size, Shard(rank, 3))
        return ranks[rank].gather(whole[:, own.start : own.stop].contiguous(), vocab_size)

    made, *others = on_all(3, gather)
    assert torch.equal(made, whole)
    assert others == [None, None]


def test_all_have_what_rank_0_has_and_agree_on_the_least(places: Places) -> None:
    ranks = met(places, 3)

    def share(rank: int) -> tuple[list[int], list[int]]:
        tokens = torch.full((4,), rank + 7)
        ranks[rank].share(tokens)
        return tokens.tolist(), ranks[rank].hosts.least([10 - rank, rank])

    assert on_all(3, share) == [([7] * 4, [8, 0])] * 3


def test_rank_that_does_not_come_is_given_up(places: Places) -> None:
    ranks = met(places, 2)
    on_all(2, lambda rank: ranks[rank].wait_at_most(0.2))
    with pytest.raises(RanksFailedError):
        ranks[0].all_reduce(torch.ones(1, 2))


def test_a_group_that_has_ended_exchanges_nothing(places: Places) -> None:
    ranks = met(places, 2)
    ranks[0].abort("rank 1 ended")
    ranks[0].abort("something later")
    for exchange in (ranks[0].all_reduce, ranks[0].share, lambda rows: ranks[0].gather(rows, 2)):
        with pytest.raises(RanksFailedError, match="rank 1 ended"):
            exchange(torch.ones(1, 2))
    with pytest.raises(RanksFailedError, match="rank 1 ended"):
        ranks[0].hosts.least([1])


def test_ranks_that_do_not_meet_say_so(tmp_path: Path) -> None:
    place = folder_places(tmp_path)(0)
    with pytest.raises(RanksFailedError, match="did not find one another"):
        DeviceRanks(place, CPU, Shard(0, 2), fixed=False, timeout_s=0.2)
    nowhere = NetworkPlace("127.0.0.1", free_port(), "127.0.0.1")
    with pytest.raises(RanksFailedError, match="did not find one another"):
        Rendezvous.at(nowhere, 0.2)

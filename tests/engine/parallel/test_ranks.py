"""Exchanges of ranks, the same over shared memory and over Gloo: ranks are threads here, as neither
transport holds Python's lock while it waits."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.engine.kernels.build import cpu_library
from millrace.engine.kernels.rank_view import MAX_RANKS, RanksFailedError
from millrace.engine.kernels.ranks import RankShape, SharedRanks, rank_memory
from millrace.engine.parallel.ranks import GlooRanks, Ranks
from tests.engine.parallel.places import Places, folder_places, network_places

TIMEOUT_S = 30.0
# A page: more numbers than that are exchanged in pieces.
BUFFER_BYTES = 4096
MESSAGE_BYTES = 1 << 16

Make = Callable[[int, float, Path], list[Ranks]]


def _shared(size: int, timeout_s: float, _folder: Path) -> list[Ranks]:
    shape = RankShape(size, MESSAGE_BYTES, BUFFER_BYTES)
    fd = rank_memory(shape)
    try:
        return [
            SharedRanks(cpu_library(), fd, shape, rank=rank, timeout_s=timeout_s)
            for rank in range(size)
        ]
    finally:
        os.close(fd)


def _gloo(places: Places, size: int, timeout_s: float) -> list[Ranks]:
    def make(rank: int) -> Ranks:
        return GlooRanks(places(rank), rank=rank, size=size, timeout_s=timeout_s)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(make, range(size)))


def _gloo_on_one_host(size: int, timeout_s: float, folder: Path) -> list[Ranks]:
    return _gloo(folder_places(folder), size, timeout_s)


def _gloo_by_network(size: int, timeout_s: float, folder: Path) -> list[Ranks]:
    return _gloo(network_places(folder), size, timeout_s)


@pytest.fixture(
    params=[_shared, _gloo_on_one_host, _gloo_by_network],
    ids=["shared memory", "gloo", "gloo by network"],
)
def make(request: pytest.FixtureRequest) -> Make:
    made: Make = request.param
    return made


@pytest.fixture
def group(make: Make, tmp_path: Path) -> list[Ranks]:
    return make(3, TIMEOUT_S, tmp_path)


@contextmanager
def _threads(size: int) -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(size) as pool:
        yield pool


def _on_all(ranks: list[Ranks], compute: Callable[[Ranks], Any]) -> list[Any]:
    with _threads(len(ranks)) as pool:
        return list(pool.map(compute, ranks))


def test_all_ranks_have_the_same_sum(group: list[Ranks]) -> None:
    parts = [torch.randn(5, 700, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    wanted = parts[0] + parts[1] + parts[2]

    def reduce(ranks: Ranks) -> torch.Tensor:
        own = parts[ranks.rank].clone()
        ranks.all_reduce(own)
        return own

    for _ in range(3):  # buffers take turns
        first, *others = _on_all(group, reduce)
        torch.testing.assert_close(first, wanted)
        assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_narrow_numbers_are_summed_wide_and_rounded_once(
    group: list[Ranks], dtype: torch.dtype
) -> None:
    parts = [torch.tensor([[1.0, 256.0]]), torch.tensor([[2**-9, 1.0]]), torch.tensor([[2**-9, 1]])]

    def reduce(ranks: Ranks) -> torch.Tensor:
        own = parts[ranks.rank].to(dtype)
        ranks.all_reduce(own)
        return own

    wanted = torch.stack([part.to(dtype).float() for part in parts]).sum(0).to(dtype)
    assert all(torch.equal(own, wanted) for own in _on_all(group, reduce))


def test_columns_of_all_ranks_come_together_on_rank_0(group: list[Ranks]) -> None:
    widths = [48, 48, 7]
    whole = torch.arange(103 * 60).view(60, 103).bfloat16()
    parts = [part.contiguous() for part in torch.split(whole, widths, 1)]
    gathered = _on_all(group, lambda ranks: ranks.gather(parts[ranks.rank], widths))
    assert torch.equal(gathered[0], whole)
    assert gathered[1:] == [None, None]


def test_the_others_hear_what_rank_0_says(group: list[Ranks]) -> None:
    messages = [(b"first", memoryview(b" of two")), (b"second",)]

    def talk(ranks: Ranks) -> list[bytes]:
        heard = []
        for parts in messages:
            if ranks.rank == 0:
                ranks.post(*parts)
            else:
                length = sum(map(len, parts))
                heard.append(bytes(ranks.receive()[:length]))
            ranks.all_reduce(torch.zeros(1))  # they meet before the next is said
        return heard

    assert _on_all(group, talk)[1:] == [[b"first of two", b"second"]] * 2


def test_rank_that_does_not_come_in_time_ends_the_group(make: Make, tmp_path: Path) -> None:
    ranks = make(2, 0.2, tmp_path)
    with pytest.raises(RanksFailedError):
        ranks[0].all_reduce(torch.zeros(4))


def test_a_group_that_was_ended_says_why(group: list[Ranks]) -> None:
    group[0].abort("rank 2 is gone")
    with pytest.raises(RanksFailedError, match="rank 2 is gone"):
        group[0].check()
    with pytest.raises(RanksFailedError, match="rank 2 is gone"):
        group[0].all_reduce(torch.zeros(4))


class TestSharedMemory:
    """Shared memory's own duties, which Gloo leaves to its sockets."""

    @settings(max_examples=30, deadline=None)
    @given(
        size=st.integers(1, 5),
        num_rows=st.integers(1, 4),
        width=st.integers(1, 3000),
        seed=st.integers(0, 2**30),
    )
    def test_any_shape_is_summed_in_the_order_of_the_ranks(
        self, size: int, num_rows: int, width: int, seed: int
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        parts = [torch.randn(num_rows, width, generator=generator) for _ in range(size)]
        wanted = parts[0].clone()
        for part in parts[1:]:
            wanted += part

        def reduce(ranks: Ranks) -> torch.Tensor:
            own = parts[ranks.rank].clone()
            ranks.all_reduce(own)
            return own

        for own in _on_all(_shared(size, TIMEOUT_S, Path()), reduce):
            assert torch.equal(own, wanted)

    def test_waiting_rank_learns_that_the_group_has_ended(self) -> None:
        ranks = _shared(2, TIMEOUT_S, Path())
        with _threads(2) as pool:
            meeting = pool.submit(ranks[1].all_reduce, torch.zeros(4))
            hearing = pool.submit(ranks[0].receive)
            ranks[0].abort("rank 1 is gone")
            assert isinstance(meeting.exception(TIMEOUT_S), RanksFailedError)
            assert isinstance(hearing.exception(TIMEOUT_S), RanksFailedError)

    def test_the_one_that_is_late_is_named(self) -> None:
        ranks = _shared(3, 0.2, Path())
        with _threads(2) as pool:
            early = [pool.submit(one.all_reduce, torch.zeros(4)) for one in (ranks[0], ranks[2])]
            for one in early:
                assert "rank 1 did not come" in str(one.exception(TIMEOUT_S))
        with pytest.raises(RanksFailedError, match="rank 1 did not come"):
            ranks[1].all_reduce(torch.zeros(4))

    def test_traffic_is_counted(self) -> None:
        ranks = _shared(2, TIMEOUT_S, Path())
        _on_all(ranks, lambda one: one.all_reduce(torch.zeros(3, 10)))
        for one in ranks:
            assert isinstance(one, SharedRanks)
            assert one.traffic.num_exchanges == 1
            assert one.traffic.num_bytes == 3 * 10 * 4
            assert 0 < one.traffic.waited_s < TIMEOUT_S

    def test_a_message_that_is_too_long_is_refused(self) -> None:
        [only] = _shared(1, TIMEOUT_S, Path())
        with pytest.raises(ValueError, match="too long"):
            only.post(bytes(MESSAGE_BYTES), b"!")

    @pytest.mark.parametrize("size", [0, MAX_RANKS + 1])
    def test_there_is_a_most_of_ranks(self, size: int) -> None:
        with pytest.raises(ValueError, match=f"1 to {MAX_RANKS} ranks, not {size}"):
            RankShape(size, MESSAGE_BYTES, BUFFER_BYTES)

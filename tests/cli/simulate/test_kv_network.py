"""Pulls of blocks between simulated workers: their duration and failures."""

from __future__ import annotations

import asyncio

import pytest

from millrace.runtime.virtual_time import VirtualClock, run_virtual
from millrace.schemas.transfer import KvSource, TransferEndpoint
from millrace.simulation.settings import KvLink
from millrace.simulation.workers.kv_network import KvNetwork
from millrace.workers.simulated.blocks import GenerationLimits, SimulatedBlocks, SimulatedSequence

_SIZE = 4
# 4 tokens, a block, take 40 ms; computing them takes 400.
_LINK = KvLink(bytes_per_token=10.0, bytes_per_s=1_000.0, overhead_s=0.005)


def _sequence(name: str, num_tokens: int = 41) -> SimulatedSequence:
    return SimulatedSequence(
        name, range(num_tokens), limits=GenerationLimits(num_to_make=1), seed=0
    )


def _source(worker_id: str, num_tokens: int = 0) -> KvSource:
    endpoint = TransferEndpoint(layout="simulated", token=worker_id)
    return KvSource(worker_id=worker_id, endpoint=endpoint, num_tokens=num_tokens)


class _World:
    """Three workers, of which the first has the blocks of 40 tokens."""

    def __init__(self, link: KvLink = _LINK, num_blocks: int = 16) -> None:
        self.loop = asyncio.get_running_loop()
        self.network = KvNetwork(link, _SIZE, prefill_tokens_per_s=10.0)
        self.blocks = {
            name: SimulatedBlocks(num_blocks, _SIZE, keep=True) for name in ("a", "b", "c")
        }
        for name, blocks in self.blocks.items():
            self.network.join(name, blocks)
        holder = _sequence("holder")
        self.blocks["a"].open(holder, self.blocks["a"].match(holder), 10)
        self.blocks["a"].cache_full_blocks(holder, 10)
        self.blocks["a"].release(holder)
        self.done_s: dict[str, float] = {}

    def pull(self, to: str, source: KvSource, name: str = "r") -> bool:
        return self.network.pull(
            to, source, _sequence(name), lambda: self.done_s.update({name: self.loop.time()})
        )

    def num_found(self, name: str) -> int:
        return self.blocks[name].match(_sequence("looker")).num_blocks


def test_a_pull_takes_its_bytes_and_an_overhead() -> None:
    async def main(clock: VirtualClock) -> None:
        world = _World()
        assert world.pull("b", _source("a"))
        assert world.num_found("b") == 0
        await clock.sleep(1.0)
        assert world.done_s == {"r": pytest.approx(0.405)}
        assert world.num_found("b") == 10
        assert world.network.num_pulled_tokens == 40
        assert world.network.tokens_per_s("b") == pytest.approx(40 / 0.405)
        assert world.network.tokens_per_s("a") == 0.0
        # It is all there: nothing is left to pull.
        assert not world.pull("b", _source("a"), "again")

    run_virtual(main)


def test_a_link_carries_one_pull_at_a_time_in_each_direction() -> None:
    async def main(clock: VirtualClock) -> None:
        world = _World()
        assert world.pull("b", _source("a"), "first")
        assert world.pull("c", _source("a"), "second")
        await clock.sleep(1.0)
        assert world.done_s["first"] == pytest.approx(0.405)
        assert world.done_s["second"] == pytest.approx(0.805)

    run_virtual(main)


def test_a_source_without_blocks_or_absent_is_not_pulled_from() -> None:
    async def main(_clock: VirtualClock) -> None:
        world = _World()
        assert not world.pull("b", _source("nobody"))
        assert not world.pull("a", _source("a"))
        assert not world.pull("b", _source("c"))
        assert world.num_found("b") == 0

    run_virtual(main)


@pytest.mark.parametrize("bytes_per_s", [99.0, 150.0])
def test_what_takes_longer_than_computing_or_than_two_seconds_is_not_begun(
    bytes_per_s: float,
) -> None:
    async def main(_clock: VirtualClock) -> None:
        link = KvLink(bytes_per_token=10.0, bytes_per_s=bytes_per_s, overhead_s=0.0)
        assert not _World(link).pull("b", _source("a"))

    run_virtual(main)


def test_a_request_computes_its_blocks_when_its_source_ends() -> None:
    async def main(clock: VirtualClock) -> None:
        world = _World()
        world.pull("b", _source("a"))
        await clock.sleep(0.1)
        world.network.leave("a")
        await clock.sleep(1.0)
        assert world.done_s == {"r": pytest.approx(0.1)}
        assert world.num_found("b") == 0
        assert world.network.num_pulled_tokens == 0

    run_virtual(main)


def test_nobody_hears_of_what_was_to_go_to_a_worker_that_ended() -> None:
    async def main(clock: VirtualClock) -> None:
        world = _World()
        world.pull("b", _source("a"))
        world.network.leave("b")
        await clock.sleep(1.0)
        assert world.done_s == {}

    run_virtual(main)


def test_blocks_without_room_are_not_pulled() -> None:
    async def main(clock: VirtualClock) -> None:
        world = _World()
        taken = _sequence("taken")
        world.blocks["b"].open(taken, world.blocks["b"].match(taken), 12)
        world.pull("b", _source("a"))
        await clock.sleep(1.0)
        assert world.num_found("b") == 4
        world.blocks["b"].check_integrity([taken])

    run_virtual(main)

"""Links between stages of devices, over Gloo as on a CPU: ranks are threads here."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from queue import Queue

import pytest
import torch

from millrace.engine.kernels.ranks import RanksFailedError
from millrace.engine.parallel.device_ranks import StageLinks
from millrace.registry.checkpoints.shard import Shard
from tests.engine.parallel.places import Places

CPU = torch.device("cpu")
# What no socket takes before its receiver is there.
NUM_NUMBERS = 1 << 22
NUM_STEPS = 7
# Message of rank 0: a step, the rows of an earlier step (so many steps back), or None for the end.
Messages = Queue[tuple[str, int] | None]


def met(
    places: Places, num_stages: int, size: int = 1, timeout_s: float = 30.0
) -> list[list[StageLinks]]:
    """Return the links of all ranks, by stage and rank."""

    def meet(number: int) -> StageLinks:
        stage, rank = divmod(number, size)
        shard = Shard(rank, size, stage=stage, num_stages=num_stages)
        return StageLinks(places(number), CPU, shard, timeout_s=timeout_s)

    with ThreadPoolExecutor(num_stages * size) as pool:
        links = list(pool.map(meet, range(num_stages * size)))
    return [links[begin : begin + size] for begin in range(0, len(links), size)]


def _lead(links: StageLinks, others: list[Messages]) -> list[tuple[float, float]]:
    """Play rank 0: send steps, and return the results of each step and the rows of every other
    one."""
    hidden, result = torch.empty(NUM_NUMBERS), torch.empty(NUM_NUMBERS)
    read: list[tuple[float, float]] = []

    def tell(message: tuple[str, int] | None) -> None:
        for other in others:
            other.put(message)

    def launch(step: int) -> None:
        tell(("step", step))
        links.receive_hidden(hidden)
        hidden.fill_(step)
        links.send_hidden(hidden)

    launch(0)
    for step in range(NUM_STEPS):
        if step + 1 < NUM_STEPS:
            launch(step + 1)
        links.receive_results(result)
        made, rows = float(result[-1]), torch.full((3,), -1.0)
        if step % 2:
            tell(("rows", step))
            links.receive_rows(rows)
        read.append((made, float(rows[-1])))
    tell(None)
    return read


def _follow(links: StageLinks, queue: Messages, *, is_last: bool) -> None:
    hidden, result = torch.empty(NUM_NUMBERS), torch.empty(NUM_NUMBERS)
    while (message := queue.get(timeout=60)) is not None:
        what, step = message
        if what == "rows":
            if is_last:
                links.send_rows(torch.full((3,), step * 100.0))
            continue
        links.receive_hidden(hidden)
        hidden += 0.25
        if is_last:
            result.copy_(hidden)
            links.send_results(result)
        else:
            links.send_hidden(hidden)


@pytest.mark.parametrize("num_stages", [2, 3])
def test_two_steps_at_a_time_go_through_all_stages(places: Places, num_stages: int) -> None:
    """No stage waits forever, although no stage takes a step for which it has no room yet."""
    [first], *others = met(places, num_stages)
    queues: list[Messages] = [Queue() for _ in others]
    with ThreadPoolExecutor(num_stages) as pool:
        done = [
            pool.submit(_follow, links, queue, is_last=links is others[-1][0])
            for [links], queue in zip(others, queues, strict=True)
        ]
        read = pool.submit(_lead, first, queues).result(60)
        for one in done:
            one.result(60)
    added = 0.25 * (num_stages - 1)
    assert read == [(step + added, step * 100.0 if step % 2 else -1.0) for step in range(NUM_STEPS)]


def test_each_rank_has_its_own_of_the_next_stage(places: Places) -> None:
    first, last = met(places, 2, size=2)
    came = [torch.zeros(1), torch.zeros(1)]
    with ThreadPoolExecutor(2) as pool:
        waiting = [
            pool.submit(links.receive_hidden, own) for links, own in zip(last, came, strict=True)
        ]
        for rank in (1, 0):
            first[rank].send_hidden(torch.tensor([rank + 5.0]))
        for one in waiting:
            one.result(30)
    assert [float(own) for own in came] == [5.0, 6.0]
    # Results are rank 0's alone.
    assert [len(links.exchanges) for links in (*first, *last)] == [3, 1, 3, 1]


def test_rank_that_does_not_come_is_given_up(places: Places) -> None:
    [[first], [last]] = met(places, 2)
    for links in (first, last):
        for exchange in links.exchanges:
            exchange.wait_at_most(0.2)
    with pytest.raises(RanksFailedError):
        last.receive_hidden(torch.ones(1))
    with pytest.raises(RanksFailedError):
        first.receive_results(torch.ones(1))


def test_nothing_goes_through_a_group_that_has_ended(places: Places) -> None:
    [[first], [last]] = met(places, 2)
    for links in (first, last):
        for exchange in links.exchanges:
            exchange.abort("rank 1 ended")
            exchange.abort("something later")
    for exchanged in (first.send_hidden, first.receive_results, first.receive_rows):
        with pytest.raises(RanksFailedError, match="rank 1 ended"):
            exchanged(torch.ones(1))
    for exchanged in (last.receive_hidden, last.send_results, last.send_rows):
        with pytest.raises(RanksFailedError, match="rank 1 ended"):
            exchanged(torch.ones(1))

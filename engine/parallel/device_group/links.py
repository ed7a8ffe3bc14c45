"""What goes from stage to stage of a pipeline whose ranks have a device each."""

from __future__ import annotations

from typing import Any

import torch

from millrace.engine.models.shard import Shard
from millrace.engine.parallel.device_group.exchange import Exchange
from millrace.engine.parallel.group.rendezvous import Rendezvous

# Of the two stages between which results go.
_FIRST, _LAST = 0, 1


class Way:
    """Tensors from one rank of an exchange to another, which come in the order in which they are
    sent, and are of the same size and type on both sides."""

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self._sent: list[tuple[Any, torch.Tensor]] = []

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """Begin to send one, which must not change before it is ``settle``d."""
        work = self.exchange.begin(lambda group: group.send([tensor], to, 0))
        self._sent.append((work, tensor))

    def receive(self, tensor: torch.Tensor, source: int) -> None:
        """Wait for the next one, which takes the place of ``tensor``."""
        self.exchange.wait(self.exchange.begin(lambda group: group.recv([tensor], source, 0)))

    def settle(self) -> None:
        """Wait until all that was sent has been received."""
        for work, _ in self._sent:
            self.exchange.wait(work)
        self._sent.clear()


class StageLinks:
    """The ways of one rank: hidden states come from the rank of its number in the stage before and
    go to that in the stage behind; every rank of a stage has the same. From the last stage's rank 0
    to that of the first go the ``results`` of each step, and ``rows`` of it that are asked for.

    Every rank does all of this in the order in which rank 0 tells of the steps, at most two of
    which are under way: it launches step t + 1 only when it has read step t - 1, and reads step t
    behind that launch. A step is, on each rank: receive its hidden states, compute, begin to send
    what came of it; and before the memory of what was sent is written again, wait until that is
    received. On rank 0 a read is: receive the results of the step.

    So nobody waits for ever, though no send may end before its receiver is there. Number what is
    done at stage s of S for step t as (t, s), sending from there to the next (t, s + 1/2), and the
    results of step t as (t + 1, 1/4), between what the first stage computes and sends for step
    t + 1. Then each rank waits for smaller numbers only. To compute (t, s) it waits for what it
    sent as (t - 1, s + 1/2), and to receive (t, s - 1/2); the last stage, whose s is 1 at least,
    for the results of step t - 1, (t, 1/4). Rank 0 waits for results (t + 1, 1/4) when it has
    computed (t + 1, 0); it has begun to send (t + 1, 1/2), but does not wait for that. It would
    wait for ever if it did: the last of two stages, which waits until its results are received,
    would not come to receive them. And as one who is told of a step always comes to that message,
    since all that is before it is smaller, rank 0 can always tell the next one. ``rows`` are asked
    for while a step is read, behind step t + 1, whose hidden states are being sent by then: they
    have a way of their own, as the results of that step are before them on the other one.

    NCCL has one queue for both directions between two ranks of an exchange, in which hidden states
    of step t + 1 and results of step t would be in another order on either side: so each way is an
    exchange of its own.
    """

    def __init__(
        self, place: Rendezvous, device: torch.device, shard: Shard, *, timeout_s: float
    ) -> None:
        """Meet the others, see ``DeviceRanks``. Raises RanksFailedError."""
        self._stage = shard.stage
        self._shard = shard

        def way(name: str, rank: int, size: int) -> Way:
            return Way(Exchange(place, name, device, rank=rank, size=size, timeout_s=timeout_s))

        self._hidden = way(f"hidden-{shard.rank}", shard.stage, shard.num_stages)
        self._results: Way | None = None
        self._rows: Way | None = None
        if shard.rank == 0 and (shard.is_first or shard.is_last):
            own = _LAST if shard.is_last else _FIRST
            self._results, self._rows = way("results", own, 2), way("rows", own, 2)
        self._meet(torch.zeros(1, device=device))

    @property
    def exchanges(self) -> list[Exchange]:
        """Those that this rank takes part in."""
        ways = (self._hidden, self._results, self._rows)
        return [way.exchange for way in ways if way is not None]

    def receive_hidden(self, rows: torch.Tensor) -> None:
        """Those of the stage before, once nothing of this one is under way any more."""
        self.settle()
        if not self._shard.is_first:
            self._hidden.receive(rows, self._stage - 1)

    def send_hidden(self, rows: torch.Tensor) -> None:
        """To the stage behind, if there is one."""
        if not self._shard.is_last:
            self._hidden.send(rows, self._stage + 1)

    def settle(self) -> None:
        """Wait until the hidden states and results that were sent have been received."""
        self._hidden.settle()
        if self._results is not None:
            self._results.settle()

    def send_results(self, *tensors: torch.Tensor) -> None:
        """To rank 0: by the last stage's."""
        for tensor in tensors:
            _known(self._results).send(tensor, _FIRST)

    def receive_results(self, *tensors: torch.Tensor) -> None:
        """Of the oldest step that was not read: by rank 0."""
        for tensor in tensors:
            _known(self._results).receive(tensor, _LAST)

    def send_rows(self, rows: torch.Tensor) -> None:
        """Those that rank 0 has asked for, who has those before them: by the last stage's."""
        way = _known(self._rows)
        way.settle()
        way.send(rows, _FIRST)

    def receive_rows(self, rows: torch.Tensor) -> None:
        """Those that were asked for: by rank 0."""
        _known(self._rows).receive(rows, _LAST)

    def _meet(self, nothing: torch.Tensor) -> None:
        """Ranks with CUDA devices meet when they first exchange something."""
        self.receive_hidden(nothing)
        self.send_hidden(nothing)
        if self._results is None:
            return
        if self._shard.is_last:
            self.send_results(nothing)
            self.send_rows(nothing)
        else:
            self.settle()
            self.receive_results(nothing)
            self.receive_rows(nothing)


def _known(way: Way | None) -> Way:
    assert way is not None, "results go from the last stage's rank 0 to that of the first"
    return way

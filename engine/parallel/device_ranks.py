"""How ranks with a device each exchange numbers, within a stage and from stage to stage."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch._C import _distributed_c10d as c10d

from millrace.engine.devices.cuda.steps import DeviceDecoder, Stage, StepParts
from millrace.engine.kernels.gpu.device_batch import DeviceBatch
from millrace.engine.parallel.ranks import GlooRanks
from millrace.engine.parallel.rendezvous import RankExchange, Rendezvous
from millrace.registry.checkpoints.shard import Shard, vocabulary_range

# Of the two stages between which results go.
_FIRST, _LAST = 0, 1


class Way:
    """Tensors from one rank of an exchange to another, which come in the order in which they are
    sent, and are of the same size and type on both sides."""

    def __init__(self, exchange: RankExchange) -> None:
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
            return Way(RankExchange(place, name, device, rank=rank, size=size, timeout_s=timeout_s))

        self._hidden = way(f"hidden-{shard.rank}", shard.stage, shard.num_stages)
        self._results: Way | None = None
        self._rows: Way | None = None
        if shard.rank == 0 and (shard.is_first or shard.is_last):
            own = _LAST if shard.is_last else _FIRST
            self._results, self._rows = way("results", own, 2), way("rows", own, 2)
        self._meet(torch.zeros(1, device=device))

    @property
    def exchanges(self) -> list[RankExchange]:
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


# Up to so many ranks, each one's part of a sum goes to all others and is added up there, which is
# no more bytes than a sum in float32 that goes round, in fewer turns.
_MOST_GATHERED = 4


class DeviceRanks:
    """One rank's view of its group, see ``Collectives``: the ranks of its stage sum and gather by
    NCCL on CUDA devices, by Gloo on the CPU, and so does what goes from stage to stage by
    ``links``. Beside the steps ``hosts``, all ranks of all stages, agree always by Gloo.

    What is exchanged on a device is in its stream between what was told before and what is told
    after, and a recorded step has it in it. Sums are in float32 and rounded once: in the order of
    the ranks, whatever rows there are, with up to 4 of them or if they are to be ``fixed``; else in
    NCCL's order, which depends on the place of a number among all of them.

    Who waits longer than he may, or for a rank that has ended, gets RanksFailedError, see
    ``RankExchange``. For one thread, but for ``abort``.
    """

    def __init__(
        self,
        place: Rendezvous,
        device: torch.device,
        shard: Shard,
        *,
        fixed: bool,
        timeout_s: float,
    ) -> None:
        """Meet the others there, within ``timeout_s``. Raises RanksFailedError."""
        self.rank = shard.rank
        self.size = shard.size
        self.hosts = GlooRanks(
            place,
            rank=shard.stage * shard.size + shard.rank,
            size=shard.num_stages * shard.size,
            timeout_s=timeout_s,
        )
        self._adds_in_order = fixed or shard.size <= _MOST_GATHERED
        self._exchange = RankExchange(
            place,
            f"stage-{shard.stage}",
            device,
            rank=shard.rank,
            size=shard.size,
            timeout_s=timeout_s,
        )
        # On the stream on which all else is done, not on one of NCCL's own.
        self._gathering = c10d.AllgatherOptions()
        self._gathering.asyncOp = False
        self._summing = c10d.AllreduceOptions()
        self._summing.asyncOp = False
        self._telling = c10d.BroadcastOptions()
        self._telling.asyncOp = False
        self._telling.rootRank = 0
        # Those of devices meet when they first exchange something, for which they need the place.
        if shard.is_sliced:
            self.share(torch.zeros(1, device=device))
        self.links: StageLinks | None = None
        if shard.num_stages > 1:
            self.links = StageLinks(place, device, shard, timeout_s=timeout_s)

    def all_reduce(self, rows: torch.Tensor) -> None:
        """Replace contiguous ``rows`` [num_rows, width] by their sum over the ranks."""
        if not self._adds_in_order:
            wide = rows.float()
            self._exchange.do(lambda group: group.allreduce([wide], self._summing))
            rows.copy_(wide)
            return
        parts = self._all_parts(rows)
        total = parts[0].float()
        for part in parts[1:]:
            total += part
        rows.copy_(total)

    def gather(self, columns: torch.Tensor, num_columns: int) -> torch.Tensor | None:
        """[num_rows, num_columns] of all ranks' contiguous ``columns`` side by side, which are
        those of their ``vocabulary_range``; on rank 0 of the stage."""
        if self.size == 1:
            return columns
        widest = len(vocabulary_range(num_columns, Shard(0, self.size)))
        if columns.shape[1] < widest:
            columns = F.pad(columns, (0, widest - columns.shape[1]))
        parts = self._all_parts(columns)
        if self.rank:
            return None
        # Only the last one may have less.
        return parts.transpose(0, 1).reshape(len(columns), -1)[:, :num_columns]

    def share(self, tensor: torch.Tensor) -> None:
        """Replace a contiguous ``tensor`` by that of rank 0 of the stage."""
        self._exchange.do(lambda group: group.broadcast([tensor], self._telling))

    def wait_at_most(self, timeout_s: float) -> None:
        """For the others, from now on."""
        self.hosts.wait_at_most(timeout_s)
        for exchange in self._exchanges:
            exchange.wait_at_most(timeout_s)

    def check(self) -> None:
        """Raise RanksFailedError if the group has failed."""
        self._exchange.check()

    def abort(self, why: str) -> None:
        """Have the group fail; for any thread. What waits on a CUDA device goes on, with whatever
        numbers are there."""
        self.hosts.abort(why)
        for exchange in self._exchanges:
            exchange.abort(why)

    @property
    def _exchanges(self) -> tuple[RankExchange, ...]:
        return (self._exchange, *(() if self.links is None else self.links.exchanges))

    def _all_parts(self, rows: torch.Tensor) -> torch.Tensor:
        """[num_ranks, num_rows, width] of all ranks' contiguous ``rows``."""
        num_rows, width = rows.shape
        parts = rows.new_empty(self.size * num_rows, width)
        self._exchange.do(lambda group: group._allgather_base(parts, rows, self._gathering))
        return parts.view(self.size, num_rows, width)


class PipelineStage(Stage):
    """A stage of several. Hidden states come, are computed with and go in the same place."""

    def __init__(self, parts: StepParts, shard: Shard, links: StageLinks) -> None:
        self.is_last = shard.is_last
        self._is_first = shard.is_first
        self._links = links
        self._hidden = torch.zeros(
            parts.bounds.num_tokens,
            parts.config.hidden_size,
            dtype=parts.decoder.dtype,
            device=parts.device.torch_device,
        )

    def receive(self, num_tokens: int) -> None:
        self._links.receive_hidden(self._hidden[:num_tokens])

    def forward(self, decoder: DeviceDecoder, batch: DeviceBatch) -> torch.Tensor:
        if self._is_first:
            return decoder.forward(batch)
        return decoder.forward_hidden(batch, self._hidden[: len(batch.token_ids)])

    def leave(self, states: torch.Tensor) -> None:
        self._hidden[: len(states)].copy_(states)

    def send(self, num_tokens: int) -> None:
        self._links.send_hidden(self._hidden[:num_tokens])

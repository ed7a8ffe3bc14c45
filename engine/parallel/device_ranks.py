"""Exchanges between ranks with a device each, within a stage and from stage to stage."""

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

# Ranks of the exchange between the first and the last stage.
_FIRST, _LAST = 0, 1


class Way:
    """Ordered channel of tensors between two ranks; both sides use the same sizes and dtypes."""

    def __init__(self, exchange: RankExchange) -> None:
        self.exchange = exchange
        self._sent: list[tuple[Any, torch.Tensor]] = []

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """Begin to send ``tensor``, which must not change before ``settle`` returns."""
        work = self.exchange.begin(lambda group: group.send([tensor], to, 0))
        self._sent.append((work, tensor))

    def receive(self, tensor: torch.Tensor, source: int) -> None:
        """Wait for the next tensor and write it to ``tensor``."""
        self.exchange.wait(self.exchange.begin(lambda group: group.recv([tensor], source, 0)))

    def settle(self) -> None:
        """Wait until the receiver has all sent tensors."""
        for work, _ in self._sent:
            self.exchange.wait(work)
        self._sent.clear()


class StageLinks:
    """Channels of one rank to the ranks of other stages.

    Hidden states come from the rank of the same number in the previous stage and go to that rank in
    the next stage; every rank of a stage has the same states. Rank 0 of the last stage sends the
    ``results`` of each step, and ``rows`` that are asked for, to rank 0 of the first stage.

    Every rank works in the order in which rank 0 announces the steps. At most two steps are in
    flight: rank 0 launches step t + 1 only after it has read step t - 1, and reads step t after
    that launch. On each rank a step is: receive its hidden states, compute, begin to send the
    output. A rank waits until its output was received before it overwrites that memory. A read on
    rank 0 is: receive the results of the step.

    This order is free of deadlocks although a send ends only once its receiver arrives. Proof:
    number the work of stage s (of S stages) for step t as (t, s), its send to the next stage as (t,
    s + 1/2), and the results of step t as (t + 1, 1/4), between the compute and the send of step t
    + 1 on the first stage. Then each rank waits for smaller numbers only:

    - To compute (t, s), a rank waits for its send (t - 1, s + 1/2) and its receive (t, s - 1/2).
    The
      last stage, whose s is at least 1, also waits for the results of step t - 1, (t, 1/4).
    - Rank 0 waits for results (t + 1, 1/4) after it has computed (t + 1, 0). It has begun to send
      (t + 1, 1/2) but does not wait for that send. Waiting would deadlock: the last of two stages
      first waits until its results are received, and would never receive these states.
    - A rank always reaches the message that announces a step, since all work before it has smaller
      numbers. So rank 0 can always announce the next step.

    ``rows`` are asked for while a step is read, after the launch of step t + 1, whose hidden states
    are being sent by then. They have a channel of their own, because that step's results come first
    on the other one.

    NCCL has one queue for both directions between two ranks of an exchange. The hidden states of
    step t + 1 and the results of step t would be in a different order on each side, so each channel
    is an exchange of its own.
    """

    def __init__(
        self, place: Rendezvous, device: torch.device, shard: Shard, *, timeout_s: float
    ) -> None:
        """Meet the other ranks, see ``DeviceRanks``. Raises RanksFailedError."""
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
        """Return the exchanges that this rank takes part in."""
        ways = (self._hidden, self._results, self._rows)
        return [way.exchange for way in ways if way is not None]

    def receive_hidden(self, rows: torch.Tensor) -> None:
        """Receive the hidden states of the previous stage, once this stage's sends are done."""
        self.settle()
        if not self._shard.is_first:
            self._hidden.receive(rows, self._stage - 1)

    def send_hidden(self, rows: torch.Tensor) -> None:
        """Send hidden states to the next stage, if there is one."""
        if not self._shard.is_last:
            self._hidden.send(rows, self._stage + 1)

    def settle(self) -> None:
        """Wait until the sent hidden states and results have been received."""
        self._hidden.settle()
        if self._results is not None:
            self._results.settle()

    def send_results(self, *tensors: torch.Tensor) -> None:
        """Send results from the last stage to rank 0."""
        for tensor in tensors:
            _known(self._results).send(tensor, _FIRST)

    def receive_results(self, *tensors: torch.Tensor) -> None:
        """Receive the results of the oldest unread step on rank 0."""
        for tensor in tensors:
            _known(self._results).receive(tensor, _LAST)

    def send_rows(self, rows: torch.Tensor) -> None:
        """Send the rows that rank 0 has asked for, after it has received the previous ones."""
        way = _known(self._rows)
        way.settle()
        way.send(rows, _FIRST)

    def receive_rows(self, rows: torch.Tensor) -> None:
        """Receive the rows that rank 0 has asked for."""
        _known(self._rows).receive(rows, _LAST)

    def _meet(self, nothing: torch.Tensor) -> None:
        """Exchange a tensor once: ranks with CUDA devices connect at their first exchange."""
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


# Most ranks that sum by gathering: each rank's part goes to all others and is added there. That
# moves no more bytes than a ring sum in float32, in fewer turns.
_MOST_GATHERED = 4


class DeviceRanks:
    """Collectives of a rank with a device, see ``Collectives``.

    The ranks of a stage sum and gather by NCCL on CUDA devices and by Gloo on the CPU, and so do
    the ``links`` between stages. ``hosts`` joins all ranks of all stages beside the steps, always
    by Gloo.

    Exchanges run on the device's stream in the order of the calls, and are part of recorded steps.
    Sums are in float32 and rounded once. With up to 4 ranks, or if ``fixed``, they are added in the
    order of the ranks, independent of the number of rows. Otherwise they are added in NCCL's order,
    which depends on a number's position among all of them.

    A wait that exceeds its limit or involves an ended rank raises RanksFailedError, see
    ``RankExchange``. Use from one thread; ``abort`` may be called from any.
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
        """Meet the other ranks at ``place`` within ``timeout_s``. Raises RanksFailedError."""
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
        # Run on the stream of all other work, not on NCCL's own.
        self._gathering = c10d.AllgatherOptions()
        self._gathering.asyncOp = False
        self._summing = c10d.AllreduceOptions()
        self._summing.asyncOp = False
        self._telling = c10d.BroadcastOptions()
        self._telling.asyncOp = False
        self._telling.rootRank = 0
        # Ranks with devices connect at their first exchange, while ``place`` is still available.
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
        """Join all ranks' contiguous ``columns`` to [num_rows, num_columns], on rank 0.

        A rank's columns are those of its ``vocabulary_range``.
        """
        if self.size == 1:
            return columns
        widest = len(vocabulary_range(num_columns, Shard(0, self.size)))
        if columns.shape[1] < widest:
            columns = F.pad(columns, (0, widest - columns.shape[1]))
        parts = self._all_parts(columns)
        if self.rank:
            return None
        # Only the last rank may have fewer columns.
        return parts.transpose(0, 1).reshape(len(columns), -1)[:, :num_columns]

    def share(self, tensor: torch.Tensor) -> None:
        """Replace a contiguous ``tensor`` by the tensor of rank 0 of the stage."""
        self._exchange.do(lambda group: group.broadcast([tensor], self._telling))

    def wait_at_most(self, timeout_s: float) -> None:
        """Set the limit for waits on other ranks from now on."""
        self.hosts.wait_at_most(timeout_s)
        for exchange in self._exchanges:
            exchange.wait_at_most(timeout_s)

    def check(self) -> None:
        """Raise RanksFailedError if the group has failed."""
        self._exchange.check()

    def abort(self, why: str) -> None:
        """Fail the group; may be called from any thread.

        Work that waits on a CUDA device continues with undefined numbers.
        """
        self.hosts.abort(why)
        for exchange in self._exchanges:
            exchange.abort(why)

    @property
    def _exchanges(self) -> tuple[RankExchange, ...]:
        return (self._exchange, *(() if self.links is None else self.links.exchanges))

    def _all_parts(self, rows: torch.Tensor) -> torch.Tensor:
        """Gather all ranks' contiguous ``rows``: [num_ranks, num_rows, width]."""
        num_rows, width = rows.shape
        parts = rows.new_empty(self.size * num_rows, width)
        self._exchange.do(lambda group: group._allgather_base(parts, rows, self._gathering))
        return parts.view(self.size, num_rows, width)


class PipelineStage(Stage):
    """Stage of a pipeline, which receives, computes and sends hidden states at one address."""

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

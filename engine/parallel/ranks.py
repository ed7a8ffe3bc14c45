"""How the ranks of a stage exchange numbers; by Gloo where they have no memory in common."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist

from millrace.engine.kernels.operations import Collectives
from millrace.engine.parallel.rendezvous import RankExchange, Rendezvous
from millrace.engine.types import DeviceLostError


class RankLostError(DeviceLostError):
    """The group cannot go on: a rank has ended or hangs. It ends the process of rank 0, too."""


class Ranks(Collectives, Protocol):
    """One rank's way to the others of its group. Whatever is called after the group has failed, or
    waits while it does, raises an error."""

    def gather(self, columns: torch.Tensor, widths: list[int]) -> torch.Tensor | None:
        """All ranks' contiguous ``columns`` [num_rows, widths[rank]] side by side, on rank 0."""

    def post(self, *parts: bytes | memoryview) -> None:
        """Say something to all other ranks, which have met since the last time: by rank 0."""

    def receive(self) -> memoryview:
        """What rank 0 says next, however long that takes; there may be something behind it. Valid
        until this rank meets the others."""

    def check(self) -> None:
        """Raise an error if the group has failed."""

    def abort(self, why: str) -> None:
        """Have the group fail; for any thread."""


_NO_LIMIT_S = 365 * 86_400.0


class GlooRanks:
    """One rank's view of its group, see ``Ranks``. One who waits in an exchange for longer than
    ``timeout_s``, or for a rank that has ended, gets RanksFailedError; what rank 0 posts is waited
    for as long as that takes.
    """

    def __init__(self, place: Rendezvous, *, rank: int, size: int, timeout_s: float) -> None:
        """Meet the others there. Raises RanksFailedError."""
        self.rank = rank
        self.size = size
        cpu = torch.device("cpu")
        self._exchange, self._messages = (
            RankExchange(place, name, cpu, rank=rank, size=size, timeout_s=limit_s)
            for name, limit_s in (("exchange", timeout_s), ("messages", _NO_LIMIT_S))
        )

    def all_reduce(self, rows: torch.Tensor) -> None:
        """Replace contiguous rows by their sum over the ranks. Gloo sums in an order of its own,
        which is the same on every rank; what is narrower than float32 is widened for it."""
        wide = rows.float()
        self._exchange.do(lambda group: group.allreduce([wide]))
        if wide is not rows:
            rows.copy_(wide)

    def least(self, numbers: list[int]) -> list[int]:
        """The least of each of the ranks' numbers, of which all have equally many."""
        tensor = torch.tensor(numbers, dtype=torch.int64)
        self._exchange.do(lambda group: group.allreduce([tensor], dist.ReduceOp.MIN))
        least: list[int] = tensor.tolist()
        return least

    def wait_at_most(self, timeout_s: float) -> None:
        """For the others in an exchange, from now on."""
        self._exchange.wait_at_most(timeout_s)

    def gather(self, columns: torch.Tensor, widths: list[int]) -> torch.Tensor | None:
        """All ranks' contiguous ``columns`` [num_rows, widths[rank]] side by side, on rank 0."""
        padded = columns.new_zeros(len(columns), max(widths))
        padded[:, : columns.shape[1]] = columns
        options = dist.GatherOptions()
        options.rootRank = 0
        every = [torch.empty_like(padded) for _ in widths] if self.rank == 0 else []
        gathered = [every] if every else []
        self._exchange.do(lambda group: group.gather(gathered, [padded], options))
        if not every:
            return None
        return torch.cat([part[:, :width] for part, width in zip(every, widths, strict=True)], 1)

    def post(self, *parts: bytes | memoryview) -> None:
        """Say something to all other ranks."""
        message = torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8)
        self._broadcast(torch.tensor([len(message)]))
        self._broadcast(message)

    def receive(self) -> memoryview:
        """What rank 0 says next."""
        size = self._broadcast(torch.zeros(1, dtype=torch.int64))
        message = self._broadcast(torch.empty(int(size), dtype=torch.uint8))
        return message.numpy().data

    def check(self) -> None:
        """Raise RanksFailedError if the group has failed."""
        self._exchange.check()

    def abort(self, why: str) -> None:
        """Have the group fail; the others find its sockets closed."""
        for exchange in (self._exchange, self._messages):
            exchange.abort(why)

    def _broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self._messages.do(lambda group: group.broadcast([tensor], options))
        return tensor

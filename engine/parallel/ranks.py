"""Exchanges between the ranks of a stage, by Gloo where they share no memory."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist

from millrace.engine.kernels.operations import Collectives
from millrace.engine.parallel.rendezvous import RankExchange, Rendezvous
from millrace.engine.types import DeviceLostError


class RankLostError(DeviceLostError):
    """Failure of the group: a rank has ended or hangs. It ends rank 0's process, too."""


class Ranks(Collectives, Protocol):
    """Exchanges of one rank with the others of its group.

    Calls raise an error once the group has failed, including calls that already wait.
    """

    def gather(self, columns: torch.Tensor, widths: list[int]) -> torch.Tensor | None:
        """Join all ranks' contiguous ``columns`` [num_rows, widths[rank]] on rank 0."""

    def post(self, *parts: bytes | memoryview) -> None:
        """Send a message from rank 0 to all other ranks, which have met since the last one."""

    def receive(self) -> memoryview:
        """Wait without limit for rank 0's next message, which may have padding after it.

        It is valid until this rank meets the others.
        """

    def check(self) -> None:
        """Raise an error if the group has failed."""

    def abort(self, why: str) -> None:
        """Fail the group; may be called from any thread."""


_NO_LIMIT_S = 365 * 86_400.0


class GlooRanks:
    """Exchanges by Gloo, see ``Ranks``.

    A wait in an exchange raises RanksFailedError after ``timeout_s`` or if a rank has ended. Waits
    for rank 0's messages have no limit.
    """

    def __init__(self, place: Rendezvous, *, rank: int, size: int, timeout_s: float) -> None:
        """Meet the other ranks at ``place``. Raises RanksFailedError."""
        self.rank = rank
        self.size = size
        cpu = torch.device("cpu")
        self._exchange, self._messages = (
            RankExchange(place, name, cpu, rank=rank, size=size, timeout_s=limit_s)
            for name, limit_s in (("exchange", timeout_s), ("messages", _NO_LIMIT_S))
        )

    def all_reduce(self, rows: torch.Tensor) -> None:
        """Replace contiguous rows by their sum over the ranks.

        Gloo's order of summation is the same on every rank. Dtypes narrower than float32 are
        widened for the sum.
        """
        wide = rows.float()
        self._exchange.do(lambda group: group.allreduce([wide]))
        if wide is not rows:
            rows.copy_(wide)

    def least(self, numbers: list[int]) -> list[int]:
        """Return the elementwise minimum of the ranks' lists, which have equal lengths."""
        tensor = torch.tensor(numbers, dtype=torch.int64)
        self._exchange.do(lambda group: group.allreduce([tensor], dist.ReduceOp.MIN))
        least: list[int] = tensor.tolist()
        return least

    def wait_at_most(self, timeout_s: float) -> None:
        """Set the limit for waits in an exchange from now on."""
        self._exchange.wait_at_most(timeout_s)

    def gather(self, columns: torch.Tensor, widths: list[int]) -> torch.Tensor | None:
        """Join all ranks' contiguous ``columns`` [num_rows, widths[rank]] on rank 0."""
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
        """Send a message to all other ranks."""
        message = torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8)
        self._broadcast(torch.tensor([len(message)]))
        self._broadcast(message)

    def receive(self) -> memoryview:
        """Wait for rank 0's next message."""
        size = self._broadcast(torch.zeros(1, dtype=torch.int64))
        message = self._broadcast(torch.empty(int(size), dtype=torch.uint8))
        return message.numpy().data

    def check(self) -> None:
        """Raise RanksFailedError if the group has failed."""
        self._exchange.check()

    def abort(self, why: str) -> None:
        """Fail the group; the other ranks find its sockets closed."""
        for exchange in (self._exchange, self._messages):
            exchange.abort(why)

    def _broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self._messages.do(lambda group: group.broadcast([tensor], options))
        return tensor

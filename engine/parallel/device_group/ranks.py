"""How ranks with a device each exchange numbers: on the devices, within what these are told."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch._C import _distributed_c10d as c10d

from millrace.engine.models.shard import Shard, vocabulary_range
from millrace.engine.parallel.device_group.exchange import Exchange
from millrace.engine.parallel.device_group.links import StageLinks
from millrace.engine.parallel.group.gloo_ranks import GlooRanks
from millrace.engine.parallel.group.rendezvous import Rendezvous

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
    ``Exchange``. For one thread, but for ``abort``.
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
        self._exchange = Exchange(
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
    def _exchanges(self) -> tuple[Exchange, ...]:
        return (self._exchange, *(() if self.links is None else self.links.exchanges))

    def _all_parts(self, rows: torch.Tensor) -> torch.Tensor:
        """[num_ranks, num_rows, width] of all ranks' contiguous ``rows``."""
        num_rows, width = rows.shape
        parts = rows.new_empty(self.size * num_rows, width)
        self._exchange.do(lambda group: group._allgather_base(parts, rows, self._gathering))
        return parts.view(self.size, num_rows, width)

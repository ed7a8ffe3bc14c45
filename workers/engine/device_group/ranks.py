"""How ranks with a device each exchange numbers: on the devices, within what these are told."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch._C import _distributed_c10d as c10d

from millrace.workers.engine.group.gloo_ranks import GlooRanks
from millrace.workers.kernels.ranks import RanksFailedError
from millrace.workers.models.shard import Shard, vocabulary_range

# Up to so many ranks, each one's part of a sum goes to all others and is added up there, which is
# no more bytes than a sum in float32 that goes round, in fewer turns.
_MOST_GATHERED = 4


class DeviceRanks:
    """One rank's view of its group, see ``Collectives``: by NCCL on CUDA devices, by Gloo on the
    CPU, and beside the steps, where hosts have to agree, always by Gloo.

    What is exchanged on a device is in its stream between what was told before and what is told
    after, and a recorded step has it in it. Sums are in float32 and rounded once: in the order of
    the ranks, whatever rows there are, with up to 4 of them or if they are to be ``fixed``; else in
    NCCL's order, which depends on the place of a number among all of them.

    Who waits longer than he may, or for a rank that has ended, gets RanksFailedError; with NCCL the
    one who waits for the device is told by ``abort``. For one thread, but for ``abort``.
    """

    def __init__(
        self,
        folder: Path,
        device: torch.device,
        *,
        rank: int,
        size: int,
        fixed: bool,
        timeout_s: float,
    ) -> None:
        """Meet the others, who see the same empty ``folder``, within ``timeout_s``. Raises
        RanksFailedError."""
        self.rank = rank
        self.size = size
        self.hosts = GlooRanks(folder, rank=rank, size=size, timeout_s=timeout_s)
        self._adds_in_order = fixed or size <= _MOST_GATHERED
        self._is_cuda = device.type == "cuda"
        self._why = ""
        store = dist.FileStore(str(folder / "devices"), size)  # type: ignore[attr-defined]
        timeout = datetime.timedelta(seconds=timeout_s)
        self._group: Any
        try:
            if self._is_cuda:
                self._group = _nccl_group(store, rank, size)
            else:
                self._group = dist.ProcessGroupGloo(store, rank, size, timeout)
        except RuntimeError as error:
            raise RanksFailedError(f"the ranks did not find one another: {error}") from error
        # On the stream on which all else is done, not on one of NCCL's own.
        self._gathering = c10d.AllgatherOptions()
        self._gathering.asyncOp = False
        self._summing = c10d.AllreduceOptions()
        self._summing.asyncOp = False
        self._telling = c10d.BroadcastOptions()
        self._telling.asyncOp = False
        self._telling.rootRank = 0
        # Those of devices meet when they first exchange something, for which they need the folder.
        self.share(torch.zeros(1, device=device))

    def all_reduce(self, rows: torch.Tensor) -> None:
        """Replace contiguous ``rows`` [num_rows, width] by their sum over the ranks."""
        if not self._adds_in_order:
            wide = rows.float()
            self._do(lambda: self._group.allreduce([wide], self._summing))
            rows.copy_(wide)
            return
        parts = self._all_parts(rows)
        total = parts[0].float()
        for part in parts[1:]:
            total += part
        rows.copy_(total)

    def gather(self, columns: torch.Tensor, num_columns: int) -> torch.Tensor | None:
        """[num_rows, num_columns] of all ranks' contiguous ``columns`` side by side, which are
        those of their ``vocabulary_range``; on rank 0."""
        widest = len(vocabulary_range(num_columns, Shard(0, self.size)))
        if columns.shape[1] < widest:
            columns = F.pad(columns, (0, widest - columns.shape[1]))
        parts = self._all_parts(columns)
        if self.rank:
            return None
        # Only the last one may have less.
        return parts.transpose(0, 1).reshape(len(columns), -1)[:, :num_columns]

    def share(self, tensor: torch.Tensor) -> None:
        """Replace a contiguous ``tensor`` by that of rank 0."""
        self._do(lambda: self._group.broadcast([tensor], self._telling))

    def wait_at_most(self, timeout_s: float) -> None:
        """For the others, from now on."""
        self.hosts.wait_at_most(timeout_s)
        if not self._is_cuda:
            self._group._set_default_timeout(datetime.timedelta(seconds=timeout_s))

    def check(self) -> None:
        """Raise RanksFailedError if the group has failed."""
        if self._why:
            raise RanksFailedError(self._why)

    def abort(self, why: str) -> None:
        """Have the group fail; for any thread. What waits on a CUDA device goes on, with whatever
        numbers are there."""
        if self._why:
            return
        self._why = why
        self.hosts.abort(why)
        if self._is_cuda:
            self._group.abort()

    def _all_parts(self, rows: torch.Tensor) -> torch.Tensor:
        """[num_ranks, num_rows, width] of all ranks' contiguous ``rows``."""
        num_rows, width = rows.shape
        parts = rows.new_empty(self.size * num_rows, width)
        self._do(lambda: self._group._allgather_base(parts, rows, self._gathering))
        return parts.view(self.size, num_rows, width)

    def _do(self, exchange: Callable[[], Any]) -> None:
        self.check()
        try:
            work = exchange()
            if work is not None:
                work.wait()
        except RuntimeError as error:
            raise RanksFailedError(self._why or str(error)) from error


def _nccl_group(store: Any, rank: int, size: int) -> Any:
    """Of CUDA devices. What torch does with a rank that hangs or has ended is to end this process,
    with no word of which it was; so it is not asked to find out: ``Patience`` does."""
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    options: Any = dist.ProcessGroupNCCL.Options()
    options._timeout = datetime.timedelta(days=365)
    return dist.ProcessGroupNCCL(store, rank, size, options)

"""A process group of torch.distributed, between ranks with a device each."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from millrace.engine.kernels.ranks import RanksFailedError
from millrace.engine.parallel.group.rendezvous import Rendezvous, finding

_NCCL_TIMEOUT = datetime.timedelta(days=365)


class Exchange:
    """One rank's place in it: by NCCL on CUDA devices, by Gloo on the CPU.

    On a CUDA device to wait for something means that what is told later does; on the CPU the caller
    waits. Whoever waits longer there than he may, or for a rank that has ended, gets
    RanksFailedError; with NCCL the one who waits for the device is told by ``abort``. For one
    thread, but for ``abort``.
    """

    def __init__(
        self,
        place: Rendezvous,
        name: str,
        device: torch.device,
        *,
        rank: int,
        size: int,
        timeout_s: float,
    ) -> None:
        """Meet the others who come there under this name, within ``timeout_s``. Raises
        RanksFailedError."""
        self.is_cuda = device.type == "cuda"
        self._why = ""
        self._timeout = datetime.timedelta(seconds=timeout_s)
        self._group: Any
        if self.is_cuda:
            self._group = _nccl_group(place.store(name, size), rank, size)
        else:
            self._group = place.gloo(name, rank=rank, size=size, timeout_s=timeout_s)

    def do(self, exchange: Callable[[Any], Any]) -> None:
        """Have all ranks of the group do something together."""
        work = self.begin(exchange)
        if work is not None:
            self._wait(work.wait)

    def begin(self, exchange: Callable[[Any], Any]) -> Any:
        """Have one rank send something to another, or receive it, to be waited for later."""
        self.check()
        try:
            return exchange(self._group)
        except RuntimeError as error:
            raise self._failed(error) from error

    def wait(self, work: Any) -> None:
        """For what was begun."""
        # Gloo knows how long of itself only for what all do together.
        self._wait(work.wait if self.is_cuda else partial(work.wait, self._timeout))

    def _wait(self, wait: Callable[[], object]) -> None:
        try:
            wait()
        except RuntimeError as error:
            raise self._failed(error) from error

    def wait_at_most(self, timeout_s: float) -> None:
        """For the others, from now on."""
        self._timeout = datetime.timedelta(seconds=timeout_s)
        if not self.is_cuda:
            self._group._set_default_timeout(self._timeout)

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
        if self.is_cuda:
            self._group.abort()

    def _failed(self, error: RuntimeError) -> RanksFailedError:
        return RanksFailedError(self._why or str(error))


def _nccl_group(store: Any, rank: int, size: int) -> Any:
    """Of CUDA devices. What torch does with a rank that hangs or has ended is to end this process,
    with no word of which it was; so it is not asked to find out: ``Patience`` does. Raises
    RanksFailedError."""
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    options: Any = dist.ProcessGroupNCCL.Options()
    options._timeout = _NCCL_TIMEOUT
    with finding():
        return dist.ProcessGroupNCCL(store, rank, size, options)

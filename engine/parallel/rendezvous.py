"""Where the ranks of a group meet, and the process groups in which they exchange numbers."""

from __future__ import annotations

import datetime
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from millrace.engine.kernels.ranks import RanksFailedError
from millrace.engine.parallel.control import FolderPlace, Place

_LOOPBACK = "127.0.0.1"


@contextmanager
def finding() -> Iterator[None]:
    """What torch finds wrong meanwhile is that ranks do not find one another. Raises
    RanksFailedError for it."""
    try:
        yield
    except RuntimeError as error:
        raise RanksFailedError(f"the ranks did not find one another: {error}") from error


class Rendezvous:
    """One rank's way to a place, where ranks say under a name how they are reached."""

    def __init__(self, own_host: str, store: Callable[[str, int], Any]) -> None:
        """``store``: that of a name, for so many ranks."""
        self.store = store
        self._own_host = own_host

    @classmethod
    def at(
        cls, place: Place, timeout_s: float, listener: socket.socket | None = None
    ) -> Rendezvous:
        """Go there; ``listener`` is by whom the store is: it is at what that one listens at, and
        lives for as long as somebody has it. Raises RanksFailedError if nobody is there in
        time."""
        if isinstance(place, FolderPlace):
            folder = Path(place.path)
            return cls(
                _LOOPBACK,
                lambda name, size: c10d.FileStore(str(folder / name), size),
            )
        with finding():
            whole = c10d.TCPStore(
                place.host,
                place.port,
                is_master=listener is not None,
                timeout=datetime.timedelta(seconds=timeout_s),
                wait_for_workers=False,
                master_listen_fd=None if listener is None else listener.detach(),
            )
        return cls(place.own_host, lambda name, _: c10d.PrefixStore(name, whole))

    def gloo(self, name: str, *, rank: int, size: int, timeout_s: float) -> Any:
        """A process group of its own, beside whatever there are in this process, of those who come
        under this name; torch's types leave out what such a one does. Raises RanksFailedError."""
        gloo: Any = c10d.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = datetime.timedelta(seconds=timeout_s)
        with finding():
            # By address: where the machine's name leads nowhere Gloo would not find one.
            options._devices = [gloo.create_device(hostname=self._own_host)]
            return gloo(self.store(name, size), rank, size, options)


_NCCL_TIMEOUT = datetime.timedelta(days=365)


class RankExchange:
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

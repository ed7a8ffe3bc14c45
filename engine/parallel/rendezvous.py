"""Meeting places of the ranks of a group, and the process groups of their exchanges."""

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
    """Convert torch's errors during a meeting to RanksFailedError."""
    try:
        yield
    except RuntimeError as error:
        raise RanksFailedError(f"the ranks did not find one another: {error}") from error


class Rendezvous:
    """Meeting place as one rank sees it: ranks publish their addresses there under a name."""

    def __init__(self, own_host: str, store: Callable[[str, int], Any]) -> None:
        """Use ``store``, which returns the store of a name for a number of ranks."""
        self.store = store
        self._own_host = own_host

    @classmethod
    def at(
        cls, place: Place, timeout_s: float, listener: socket.socket | None = None
    ) -> Rendezvous:
        """Go to a place; ``listener`` is the store's socket, given by the rank that owns the store.

        The store lives as long as it is referenced. Raises RanksFailedError if it cannot be reached
        in time.
        """
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
        """Create a separate Gloo process group of the ranks that meet under ``name``.

        Its type is Any, because torch's types omit its operations. Raises RanksFailedError.
        """
        gloo: Any = c10d.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = datetime.timedelta(seconds=timeout_s)
        with finding():
            # By address: Gloo fails to find a device if the machine's name does not resolve.
            options._devices = [gloo.create_device(hostname=self._own_host)]
            return gloo(self.store(name, size), rank, size, options)


_NCCL_TIMEOUT = datetime.timedelta(days=365)


class RankExchange:
    """Exchange of one rank with the others: by NCCL on CUDA devices, by Gloo on the CPU.

    On a CUDA device a wait holds later work of the stream; on the CPU it blocks the caller. A wait
    on the CPU that exceeds its limit or involves an ended rank raises RanksFailedError. With NCCL,
    ``abort`` ends the waits for the device. Use from one thread; ``abort`` may be called from any.
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
        """Meet the ranks of this ``name`` at ``place`` within ``timeout_s``.

        Raises RanksFailedError.
        """
        self.is_cuda = device.type == "cuda"
        self._why = ""
        self._timeout = datetime.timedelta(seconds=timeout_s)
        self._group: Any
        if self.is_cuda:
            self._group = _nccl_group(place.store(name, size), rank, size)
        else:
            self._group = place.gloo(name, rank=rank, size=size, timeout_s=timeout_s)

    def do(self, exchange: Callable[[Any], Any]) -> None:
        """Run a collective of all ranks and wait for it."""
        work = self.begin(exchange)
        if work is not None:
            self._wait(work.wait)

    def begin(self, exchange: Callable[[Any], Any]) -> Any:
        """Begin a send to or a receive from another rank; wait for it by ``wait``."""
        self.check()
        try:
            return exchange(self._group)
        except RuntimeError as error:
            raise self._failed(error) from error

    def wait(self, work: Any) -> None:
        """Wait for work that ``begin`` returned."""
        # Gloo applies the group's limit to collectives only.
        self._wait(work.wait if self.is_cuda else partial(work.wait, self._timeout))

    def _wait(self, wait: Callable[[], object]) -> None:
        try:
            wait()
        except RuntimeError as error:
            raise self._failed(error) from error

    def wait_at_most(self, timeout_s: float) -> None:
        """Set the limit for waits on other ranks from now on."""
        self._timeout = datetime.timedelta(seconds=timeout_s)
        if not self.is_cuda:
            self._group._set_default_timeout(self._timeout)

    def check(self) -> None:
        """Raise RanksFailedError if the group has failed."""
        if self._why:
            raise RanksFailedError(self._why)

    def abort(self, why: str) -> None:
        """Fail the group; may be called from any thread.

        Work that waits on a CUDA device continues with undefined numbers.
        """
        if self._why:
            return
        self._why = why
        if self.is_cuda:
            self._group.abort()

    def _failed(self, error: RuntimeError) -> RanksFailedError:
        return RanksFailedError(self._why or str(error))


def _nccl_group(store: Any, rank: int, size: int) -> Any:
    """Create a process group of CUDA devices.

    Torch's own handling of a lost rank ends this process without naming the rank, so it is
    disabled; ``Patience`` finds lost ranks. Raises RanksFailedError.
    """
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    options: Any = dist.ProcessGroupNCCL.Options()
    options._timeout = _NCCL_TIMEOUT
    with finding():
        return dist.ProcessGroupNCCL(store, rank, size, options)

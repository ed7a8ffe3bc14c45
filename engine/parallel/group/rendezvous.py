"""Where the ranks of a group that exchange numbers by torch.distributed find one another."""

from __future__ import annotations

import datetime
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch._C import _distributed_c10d as c10d

from millrace.engine.kernels.ranks import RanksFailedError
from millrace.engine.parallel.group.control_wire import FolderPlace, Place

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

"""Meeting points of ranks that are threads of a test."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

from millrace.engine.parallel.control import FolderPlace, NetworkPlace
from millrace.engine.parallel.rendezvous import Rendezvous

WAIT_S = 30.0
_HOST = "127.0.0.1"

Places = Callable[[int], Rendezvous]
"""Of each rank."""


def folder_places(folder: Path) -> Places:
    return lambda _: Rendezvous.at(FolderPlace(str(folder)), WAIT_S)


def network_places(_folder: Path) -> Places:
    """Return places on a network, whose store is at rank 0."""
    listener = socket.create_server((_HOST, 0))
    place = NetworkPlace(_HOST, listener.getsockname()[1], _HOST)
    return lambda rank: Rendezvous.at(place, WAIT_S, None if rank else listener)

"""Stages of a model on another host, which is this one by way of loopback."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def remote_stages(number: int) -> Iterator[str]:
    """The address at which ``millrace stages`` joins for so many stages, until this is left."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = (sys.executable, "-m", "millrace", "stages", "--join", address)
    process = subprocess.Popen((*command, "--max-stages", str(number)), stderr=subprocess.DEVNULL)
    try:
        yield address
    finally:
        process.terminate()
        process.wait()

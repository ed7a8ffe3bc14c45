"""Addresses of block servers: a Unix socket for peers on the same machine, TCP for others."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from millrace.schemas.errors import ConfigError

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_ENDING, _LOCK = ".sock", "lock"
_BACKLOG = 64
# Bytes of a Unix socket's address, without the closing zero.
_MAX_PATH_BYTES = 107


def this_host() -> str:
    """Return the kernel's boot id, which is the same for all processes of one running machine."""
    return _BOOT_ID.read_text().strip()


def default_folder() -> Path:
    """Return the folder of the Unix sockets of this user's processes."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and Path(runtime).is_dir():
        return Path(runtime) / "millrace"
    return Path(tempfile.gettempdir()) / f"millrace-{os.getuid()}"


def listen_on_path(folder: Path) -> tuple[socket.socket, Path]:
    """Listen on a new Unix socket in ``folder``, which is created for this user alone if missing.

    Sockets that killed processes left there are removed. Raises OSError.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat(follow_symlinks=False)
    if (
        not stat.S_ISDIR(status.st_mode)
        or status.st_uid != os.getuid()
        or stat.S_IMODE(status.st_mode) & 0o077
    ):
        raise PermissionError(f"{folder} must be a folder that only this user can access")
    path = folder / f"kv-{os.getpid()}-{secrets.token_hex(4)}{_ENDING}"
    if len(os.fsencode(path)) > _MAX_PATH_BYTES:
        raise OSError(f"{path} is too long for a socket's address")
    # Under a lock, because a socket that is bound but not yet listening looks like a stale one.
    with _locked(folder):
        for other in folder.glob(f"*{_ENDING}"):
            if not _is_served(other):
                other.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(str(path))
            listener.listen(_BACKLOG)
        except OSError:
            listener.close()
            raise
    return listener, path


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    with (folder / _LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _is_served(path: Path) -> bool:
    """Return whether a process listens there; a busy process counts."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except BlockingIOError:
            return True
        except OSError:
            return False
    return True


def host_and_port(address: str, setting: str = "engine.transfer_address") -> tuple[str, int]:
    """Split ``host:port``; an IPv6 address is in brackets.

    Raises ConfigError with the name of the ``setting``.
    """
    host, colon, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdecimal() or int(port) > 0xFFFF:
        raise ConfigError(
            f"{setting} is {address!r:.80}; write host:port, with the name or "
            "address by which other machines reach this one."
        )
    return host, int(port)


def listen_on_address(address: str) -> tuple[socket.socket, str]:
    """Listen on TCP at ``address``; return the socket and the address with its port.

    Raises ConfigError.
    """
    host, port = host_and_port(address)
    try:
        family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(where[:2], family=family, backlog=_BACKLOG)
    except OSError as error:
        raise ConfigError(
            f"engine.transfer_address: nothing can be served at {address}: "
            f"{error.strerror or error}."
        ) from error
    told = f"[{host}]" if ":" in host else host
    return listener, f"{told}:{listener.getsockname()[1]}"

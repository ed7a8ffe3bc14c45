"""Process of a rank: ``python -m millrace.engine.parallel.member FD PARENT_PID CORES``.

Rank 0 starts it (``Members``). The process ends when its socket is closed, which happens when rank
0 ends. Unless PARENT_PID is 0, it also ends with the thread of PARENT_PID that started it.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import threading
from typing import TYPE_CHECKING

from millrace.engine.kernels.rank_view import RanksFailedError
from millrace.engine.parallel.control import (
    ControlSocket,
    Join,
    JoinDevices,
    Joined,
    Refused,
)
from millrace.engine.torch_start import import_torch
from millrace.runtime.logs import configure_logging
from millrace.runtime.process import die_with_parent
from millrace.schemas.errors import MillraceError

if TYPE_CHECKING:
    from millrace.engine.parallel.rank import CpuMember, DeviceMember

_LOG_LEVEL = "MILLRACE_LOG_LEVEL"

_log = logging.getLogger(__name__)


def _load(join: Join | JoinDevices, control: ControlSocket) -> CpuMember | DeviceMember:
    # Torch is imported here, see ``main``.
    from millrace.engine.parallel.rank import CpuMember, DeviceMember

    member = CpuMember(join, control) if isinstance(join, Join) else DeviceMember(join, control)
    gc.collect()
    gc.freeze()
    return member


def main(arguments: list[str]) -> int:
    """Load a rank by the first message, and compute until the group ends."""
    fd, parent_pid, cores = int(arguments[0]), int(arguments[1]), arguments[2]
    if parent_pid:
        die_with_parent(parent_pid)
    # Rank 0 decides when this process ends: it closes the socket.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.sched_setaffinity(0, map(int, cores.split(",")))
    # Import torch while rank 0 finds out what to load. Torch reads its thread settings at import,
    # from the environment that rank 0 made for this process.
    import_torch()
    control = ControlSocket(fd)
    join = control.receive()
    assert isinstance(join, Join | JoinDevices), "the first message is the request to load"
    configure_logging(f"rank {join.rank}", os.environ[_LOG_LEVEL])
    try:
        member = _load(join, control)
    except MillraceError as error:
        control.send(Refused(error.message))
        return 1
    except RanksFailedError as error:
        _log.info("another rank could not be loaded: %s", error)
        return 0
    except Exception as error:  # noqa: BLE001 (any error is reported to rank 0)
        _log.exception("a rank could not be loaded")
        control.send(Refused(f"{type(error).__name__}: {error}"))
        return 1
    control.send(Joined())
    adapters = (member.load_adapter, member.drop_adapter)
    threading.Thread(target=control.hear, args=adapters, daemon=True).start()
    try:
        member.compute()
    except RanksFailedError as error:
        _log.info("the group has ended: %s", error)
        return 0
    except Exception as error:  # noqa: BLE001 (any error ends the group)
        _log.exception("a rank failed")
        member.abort(f"rank {join.rank}: {type(error).__name__}: {error}")
        return 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

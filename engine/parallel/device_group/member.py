"""``python -m millrace.engine.parallel.device_group.member FD PARENT_PID CORES``: the process of a
rank on a device of its own, see ``group.member``."""

from __future__ import annotations

import sys

from millrace.engine.parallel.group.control_socket import ControlSocket
from millrace.engine.parallel.group.control_wire import JoinDevices, ToMember
from millrace.engine.parallel.group.member import LoadedRank, run


def _load(join: ToMember, control: ControlSocket) -> LoadedRank:
    # Torch is imported here, see ``run``.
    from millrace.engine.parallel.device_group.member_loop import DeviceMember

    assert isinstance(join, JoinDevices), "the first message says what to load"
    return DeviceMember(join, control)


if __name__ == "__main__":
    raise SystemExit(run(sys.argv[1:], _load))

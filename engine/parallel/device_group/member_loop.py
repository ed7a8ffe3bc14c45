"""What a rank on a device of its own does that is not rank 0: what it is told, in that order."""

from __future__ import annotations

import gc
import logging
import threading
from functools import partial
from typing import NoReturn

import torch

from millrace.engine.devices.cuda.steps import ToldStep
from millrace.engine.kv.cache_commands import CacheCommand, ReserveSlots
from millrace.engine.kv.cache_part import CachePart
from millrace.engine.parallel.device_group.making import load_steps, make_channel, meet
from millrace.engine.parallel.device_group.member_steps import member_steps
from millrace.engine.parallel.device_group.messages import WantedLogits, WantedRows, decode
from millrace.engine.parallel.group.control_socket import ControlSocket
from millrace.engine.parallel.group.control_wire import (
    JoinDevices,
    LoadAdapter,
    Started,
)
from millrace.engine.threads.choice import leave_core
from millrace.schemas.errors import ConfigError

_log = logging.getLogger(__name__)


class DeviceMember:
    """One rank. Raises MillraceError if it cannot be loaded, RanksFailedError if another cannot."""

    def __init__(self, join: JoinDevices, control: ControlSocket) -> None:
        self._control = control
        control.send(Started())
        self._ranks = meet(join)
        self._channel = make_channel(join, self._ranks)
        self._steps = load_steps(join, self._ranks, partial(member_steps, self._ranks))
        self._part = CachePart(self._steps.cache)
        self._num_done = 0
        self._is_done = threading.Condition()
        gc.collect()
        gc.freeze()

    @torch.inference_mode()
    def compute(self) -> NoReturn:
        """What rank 0 posts, until the group fails. Raises RanksFailedError then."""
        while True:
            message = decode(self._channel.receive())
            self._ranks.check()
            if isinstance(message, ToldStep):
                self._steps.compute(message)
            elif isinstance(message, WantedLogits):
                self._steps.make_logits(message.num_rows)
            elif isinstance(message, WantedRows):
                self._steps.make_rows(message)
            else:
                self._obey(message)
            with self._is_done:
                self._num_done += 1
                self._is_done.notify_all()

    def _obey(self, command: CacheCommand) -> None:
        """Do something with blocks; how it went is told by the least of all ranks' numbers."""
        if isinstance(command, ReserveSlots):
            self._ranks.hosts.least([self._reserve(command)])
            return
        finite = self._part.obey(command)
        if finite is not None:
            self._ranks.hosts.least([int(flag) for flag in finite])

    def _reserve(self, command: ReserveSlots) -> int:
        """Whether there is memory for it, 0 or 1."""
        try:
            self._part.obey(command)
        except ConfigError as error:
            _log.warning("%s", error.message)
            return 0
        return 1

    def hear(self) -> NoReturn:
        """What rank 0 says beside the steps, on a thread of its own."""
        leave_core()
        while True:
            message = self._control.receive()
            if isinstance(message, LoadAdapter):
                self._control.answer(message, self._load_adapter)

    def _load_adapter(self, load: LoadAdapter) -> None:
        """Once no step that was posted before can have the adapter that was in its slot."""
        with self._is_done:
            self._is_done.wait_for(lambda: self._num_done >= load.num_posted)
        self._steps.load_adapter(load)

    def abort(self, why: str) -> None:
        """End the group."""
        self._channel.abort(why)
        self._ranks.abort(why)

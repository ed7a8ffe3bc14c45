"""Readings of a CUDA device from its driver, by NVML."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import NamedTuple

logger = logging.getLogger(__name__)


class DeviceReading(NamedTuple):
    """Reading of a device at one moment.

    ``share`` is the part of the last moments in which anything ran on the device. Without a device,
    the name is empty and the numbers are 0.
    """

    name: str = ""
    share: float = 0.0
    memory_bytes: int = 0
    memory_total_bytes: int = 0


class DeviceWatch:
    """Reader of the device with the UUID ``uuid``, which the engine runs on; the UUID is "" on a
    CPU.

    Without a library or driver it logs that once, and then stops reading. ``latest`` is the last
    reading.
    """

    def __init__(self, uuid: Callable[[], str]) -> None:
        self._uuid = uuid
        self._has_failed = False
        self.latest = DeviceReading()

    async def read(self) -> DeviceReading:
        self.latest = await self._ask()
        return self.latest

    async def _ask(self) -> DeviceReading:
        uuid = self._uuid()
        if not uuid or self._has_failed:
            return DeviceReading()
        try:
            # The first call loads the driver's library, and any call may wait for the driver.
            return await asyncio.to_thread(_read, uuid)
        except _UnreadableError as error:
            self._has_failed = True
            logger.warning("the device cannot be watched", extra={"reason": str(error)})
            return DeviceReading()


class _UnreadableError(Exception):
    """Device that cannot be read; the message says why."""


def _read(uuid: str) -> DeviceReading:
    try:
        import pynvml  # only where the engine has a CUDA device
    except ImportError as error:
        raise _UnreadableError("nvidia-ml-py is not installed") from error
    try:
        pynvml.nvmlInit()  # counts its calls: what is loaded stays so
        handle = pynvml.nvmlDeviceGetHandleByUUID(
            uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"
        )
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        return DeviceReading(
            name=pynvml.nvmlDeviceGetName(handle),
            share=pynvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
            memory_bytes=memory.used,
            memory_total_bytes=memory.total,
        )
    except pynvml.NVMLError as error:
        raise _UnreadableError(str(error)) from error

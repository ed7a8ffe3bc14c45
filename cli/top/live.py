"""``millrace top`` on a terminal: snapshots, drawn until a key or a signal ends it."""

from __future__ import annotations

import asyncio
import signal
import time

from millrace.cli.top.screen import CTRL_C, Screen
from millrace.cli.top.source import SnapshotSource
from millrace.cli.top.view import Snapshot, view

_MIN_PAUSE_S = 0.2
_INTERRUPTED = 130
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class LiveView:
    """Draws snapshots until a key or a signal ends it; the terminal is left as it was before."""

    def __init__(self, source: SnapshotSource, interval_s: float) -> None:
        self._source = source
        self._interval_s = interval_s
        self._screen = Screen(self._on_key, self._draw)
        self._snapshot: Snapshot | None = None
        self._over = asyncio.Event()
        self._code = 0

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._end, 128 + number)
        loop.add_signal_handler(signal.SIGWINCH, self._draw)
        loop.add_signal_handler(signal.SIGTSTP, self._screen.suspend)
        refreshing = asyncio.create_task(self._refresh())
        refreshing.add_done_callback(lambda _: self._over.set())
        try:
            self._screen.enter()
            input_fd = self._screen.input_fd
            if input_fd is not None:
                loop.add_reader(input_fd, self._on_input, input_fd)
            await self._over.wait()
        finally:
            if self._screen.input_fd is not None:
                loop.remove_reader(self._screen.input_fd)
            self._screen.leave()
            refreshing.cancel()
            await asyncio.wait([refreshing])
        if not refreshing.cancelled():
            refreshing.result()
        return self._code

    async def _refresh(self) -> None:
        await self._source.first_reports()
        while True:
            started_s = time.monotonic()
            self._snapshot = await self._source.snapshot()
            self._draw()
            await asyncio.sleep(max(_MIN_PAUSE_S, started_s + self._interval_s - time.monotonic()))

    def _draw(self) -> None:
        if self._snapshot is None:
            return
        try:
            self._screen.show(view(self._snapshot))
        except OSError:
            self._end(128 + signal.SIGHUP)  # the terminal is gone

    def _on_input(self, input_fd: int) -> None:
        if not self._screen.read_keys():
            asyncio.get_running_loop().remove_reader(input_fd)
            self._end(128 + signal.SIGHUP)

    def _on_key(self, key: bytes) -> None:
        if key == CTRL_C:
            self._end(_INTERRUPTED)
        elif key in {b"q", b"Q"}:
            self._end(0)

    def _end(self, code: int) -> None:
        self._code = code
        self._over.set()

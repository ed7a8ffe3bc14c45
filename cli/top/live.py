"""Screen of ``millrace top`` on a terminal, redrawn until a key or a signal ends it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import termios
import time
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.segment import Segment
from rich.text import Text

from millrace.cli.top.source import SnapshotSource
from millrace.cli.top.view import Snapshot, view

_MIN_PAUSE_S = 0.2
_INTERRUPTED = 130
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class LiveView:
    """View that draws snapshots until a key or a signal ends it, and then restores the terminal."""

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


CTRL_C, _CTRL_Z = b"\x03", b"\x1a"
_MAX_KEYS = 64
_LFLAG, _CC = 3, 6


class Screen:
    """Alternate screen of standard output while it is entered, and keys of standard input.

    It owns the settings of both: ``leave`` restores them and may be called again. ``on_key`` gets a
    key as bytes; ^C comes as a key, ^Z suspends the program as a shell does.
    """

    def __init__(self, on_key: Callable[[bytes], None], redraw: Callable[[], None]) -> None:
        self._on_key = on_key
        self._redraw = redraw
        self._console = Console(force_terminal=True)
        self._input_fd = sys.stdin.fileno() if sys.stdin.isatty() else None
        self._before: list[Any] | None = None

    @property
    def input_fd(self) -> int | None:
        """File descriptor of the keys; None: no keys."""
        return self._input_fd

    def enter(self) -> None:
        if self._input_fd is not None:
            self._before = termios.tcgetattr(self._input_fd)
            raw = termios.tcgetattr(self._input_fd)
            raw[_LFLAG] &= ~(termios.ICANON | termios.ECHO | termios.ISIG | termios.IEXTEN)
            raw[_CC][termios.VMIN], raw[_CC][termios.VTIME] = 1, 0
            termios.tcsetattr(self._input_fd, termios.TCSADRAIN, raw)
        self._console.set_alt_screen(True)
        self._console.show_cursor(False)

    def leave(self) -> None:
        if not self._console.is_alt_screen:
            return
        try:
            if self._input_fd is not None and self._before is not None:
                termios.tcsetattr(self._input_fd, termios.TCSADRAIN, self._before)
            self._console.set_alt_screen(False)
            self._console.show_cursor(True)
        except (OSError, termios.error):
            return  # The terminal is gone, and there is nothing to give back.

    def read_keys(self) -> bool:
        """Handle typed keys when ``input_fd`` is readable; return False if the terminal is gone."""
        assert self._input_fd is not None
        try:
            typed = os.read(self._input_fd, _MAX_KEYS)
        except OSError:
            return False
        for key in (typed[at : at + 1] for at in range(len(typed))):
            if key == _CTRL_Z:
                self.suspend()
            else:
                self._on_key(key)
        return bool(typed)

    def suspend(self) -> None:
        """Stop the process until it is continued."""
        self.leave()
        os.kill(os.getpid(), signal.SIGSTOP)
        self.enter()
        self._redraw()

    def show(self, shown: Sequence[RenderableType]) -> None:
        """Replace the screen's contents; rows that do not fit are cut off."""
        self._console.size = width, height = os.get_terminal_size(sys.stdout.fileno())
        lines = self._console.render_lines(Group(*shown))
        if len(lines) > height:
            more = Text(f"… {len(lines) - height + 1} more lines")
            lines = [*lines[: height - 1], *self._console.render_lines(more)]
        self._console.update_screen_lines(Segment.set_shape(lines, width, height))

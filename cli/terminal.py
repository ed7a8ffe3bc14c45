"""A terminal as a screen of lines, given back as it was."""

from __future__ import annotations

import os
import signal
import sys
import termios
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import msgspec

from cli.rows import one_line, text_width

_ENTER = "\x1b[?1049h\x1b[?25l\x1b[?7l"  # the other screen, no cursor, no wrapping
_LEAVE = "\x1b[?7h\x1b[?25h\x1b[?1049l"
_HOME, _END_OF_LINE, _END_OF_SCREEN = "\x1b[H", "\x1b[K", "\x1b[J"
_CTRL_C, _CTRL_Z = b"\x03", b"\x1a"
_MAX_KEYS = 64
_LFLAG, _CC = 3, 6


class Style(Enum):
    """How a line looks where colours are wanted, as the parameter of its escape sequence."""

    PLAIN = ""
    TITLE = "7"
    HEAD = "1"
    ALERT = "31"


class Line(msgspec.Struct, frozen=True):
    text: str
    style: Style = Style.PLAIN


class Terminal:
    """The screen of standard output, while it is entered, and the keys of standard input.

    It owns how both are set: ``leave`` puts everything back, and may be called again. ``on_key``
    gets a key as bytes; ^C comes as a key, ^Z suspends the program as a shell does.
    """

    def __init__(self, on_key: Callable[[bytes], None], redraw: Callable[[], None]) -> None:
        self._on_key = on_key
        self._redraw = redraw
        self._input_fd = sys.stdin.fileno() if sys.stdin.isatty() else None
        self._before: list[Any] | None = None
        self._is_entered = False

    @property
    def input_fd(self) -> int | None:
        """Where keys come from; None: from nowhere."""
        return self._input_fd

    def enter(self) -> None:
        self._is_entered = True
        if self._input_fd is not None:
            self._before = termios.tcgetattr(self._input_fd)
            quiet = termios.tcgetattr(self._input_fd)
            quiet[_LFLAG] &= ~(termios.ICANON | termios.ECHO | termios.ISIG | termios.IEXTEN)
            quiet[_CC][termios.VMIN], quiet[_CC][termios.VTIME] = 1, 0
            termios.tcsetattr(self._input_fd, termios.TCSADRAIN, quiet)
        _write(_ENTER)

    def leave(self) -> None:
        if not self._is_entered:
            return
        self._is_entered = False
        try:
            if self._input_fd is not None and self._before is not None:
                termios.tcsetattr(self._input_fd, termios.TCSADRAIN, self._before)
            _write(_LEAVE)
        except (OSError, termios.error):
            return  # It is gone, and there is nothing to give back.

    def read_keys(self) -> bool:
        """Take what was typed, when ``input_fd`` is readable; False if the terminal is gone."""
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
        """Stop until somebody has the program go on."""
        self.leave()
        os.kill(os.getpid(), signal.SIGSTOP)
        self.enter()
        self._redraw()

    def size(self) -> os.terminal_size:
        return os.get_terminal_size(sys.stdout.fileno())

    def show(self, lines: Sequence[Line]) -> None:
        """Put these in the place of what was there; what does not fit is cut off."""
        width, height = self.size()
        if len(lines) > height:
            more = Line(f"… {len(lines) - height + 1} more lines")
            lines = [*lines[: height - 1], more]
        has_colours = not os.environ.get("NO_COLOR")
        shown = [_styled(line, width, has_colours) for line in lines]
        _write(_HOME + "\r\n".join(shown) + _END_OF_SCREEN)


def is_ctrl_c(key: bytes) -> bool:
    return key == _CTRL_C


def cut(text: str, width: int) -> str:
    """As much of a line as fits so many columns."""
    text = one_line(text)
    if text_width(text) <= width:
        return text
    while text and text_width(text) > width - 1:
        text = text[:-1]
    return f"{text}…" if width > 0 else ""


def _styled(line: Line, width: int, has_colours: bool) -> str:
    text = cut(line.text, width)
    if line.style is Style.PLAIN or not has_colours:
        return text + _END_OF_LINE
    if line.style is Style.TITLE:
        text += " " * (width - text_width(text))
    return f"\x1b[{line.style.value}m{text}\x1b[0m{_END_OF_LINE}"


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()

"""Grammars are tried in a process of their own first.

A few lines of grammar can send the library into a recursion that overflows the stack, which ends
its process, or into a construction that takes hours. Here that ends a helper, and costs the
request that brought the grammar; the engine compiles what has passed.
"""

from __future__ import annotations

import math
import os
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import BinaryIO

import msgspec

from schemas.errors import GrammarError
from schemas.sampling import Grammar

COMPILE_LIMIT_S = 5.0
_START_LIMIT_S = 30.0
_MODULE = "workers.engine.grammar_probe"
_ROOT = Path(__file__).resolve().parents[2]
_READY = b"ready\n"

_encode = msgspec.json.Encoder().encode
_grammar_decoder = msgspec.json.Decoder(Grammar)
_verdict_decoder = msgspec.json.Decoder(str)


class _Helper:
    """One process, which tries one grammar at a time. It ends when its input is closed, and kills
    itself when it works for long after that."""

    def __init__(self, command: list[str]) -> None:
        search = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
        self._process = subprocess.Popen(  # noqa: S603 (this module, in this interpreter)
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": search},
        )
        self._received = b""
        if self._read_line(_START_LIMIT_S) != _READY:
            self.kill()
            raise GrammarError("Grammars cannot be compiled here; the worker's log says why.")

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def verdict(self, grammar: bytes, limit_s: float) -> str:
        """What is wrong with a grammar (as JSON), "" if nothing. Raises GrammarError when it
        cannot be told: then the process is gone."""
        stdin = self._process.stdin
        assert stdin is not None
        try:
            stdin.write(grammar + b"\n")
            stdin.flush()
            line = self._read_line(limit_s)
        except BrokenPipeError:
            line = b""
        if line:
            return _verdict_decoder.decode(line)
        crashed = self._process.poll() is not None
        self.kill()
        if crashed:
            raise GrammarError("The grammar is too deeply nested to be compiled.")
        raise GrammarError(f"The grammar takes more than {limit_s:g} s to compile.")

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()

    def close(self) -> None:
        """Let the process end by itself."""
        self._process.communicate()

    def _read_line(self, limit_s: float) -> bytes:
        """A line with its end; nothing once ``limit_s`` has passed or the process has ended."""
        stdout = self._process.stdout
        assert stdout is not None
        deadline = time.monotonic() + limit_s
        while b"\n" not in self._received:
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not select.select([stdout], [], [], left_s)[0]:
                return b""
            data = os.read(stdout.fileno(), 1 << 16)
            if not data:
                self._process.wait()
                return b""
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        return line + b"\n"


class GrammarProbe:
    """Says whether a grammar can be compiled without harm. For several threads at once.

    Owns its processes: one for each thread that asked at the same time. They end with this
    process.
    """

    def __init__(self, limit_s: float = COMPILE_LIMIT_S, command: list[str] | None = None) -> None:
        self._limit_s = limit_s
        self._command = command or [sys.executable, "-m", _MODULE, str(math.ceil(2 * limit_s))]
        self._lock = threading.Lock()
        self._idle: list[_Helper] = []

    def check(self, grammar: Grammar) -> None:
        """Raises GrammarError for a grammar that is invalid, crashes the library or takes long."""
        try:
            text = _encode(grammar)
        except UnicodeEncodeError as error:
            raise GrammarError("The grammar is not valid Unicode text.") from error
        with self._lock:
            helper = self._idle.pop() if self._idle else None
        if helper is None or not helper.alive:
            helper = _Helper(self._command)
        problem = helper.verdict(text, self._limit_s)
        with self._lock:
            self._idle.append(helper)
        if problem:
            raise GrammarError(problem)

    def close(self) -> None:
        """End the processes that wait for work."""
        with self._lock:
            idle, self._idle = self._idle, []
        for helper in idle:
            helper.close()


def serve(requests: BinaryIO, answers: BinaryIO, kill_after_s: int) -> None:
    """The helper's side: a grammar a line in, a verdict a line out, until the end of ``requests``.

    The vocabulary is that of single bytes: all that is tried here is the grammar itself.
    """
    from llguidance import LLTokenizer

    from workers.engine.grammar_library import start

    tokenizer = LLTokenizer("byte")
    answers.write(_READY)
    answers.flush()
    for line in requests:
        verdict = ""
        # Its default action ends the process also where Python does not get a word in.
        signal.alarm(kill_after_s)
        try:
            start(tokenizer, _grammar_decoder.decode(line)).compute_bitmask()
        except GrammarError as error:
            verdict = error.message
        signal.alarm(0)
        answers.write(_encode(verdict) + b"\n")
        answers.flush()


def main(arguments: list[str]) -> int:
    """The helper's process; its argument is for how many seconds it may try one grammar."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    serve(sys.stdin.buffer, sys.stdout.buffer, int(arguments[0]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

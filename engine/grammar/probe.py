"""Trial of grammars in a process of their own, before the engine compiles them.

A few lines of grammar can make the library overflow the stack, which ends its process, or compute
for hours. A trial in a fork of a helper process only costs the request with that grammar; the
engine compiles grammars that passed. The limit is the fork's processor time, so that a busy machine
rejects the same grammars as an idle one.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
import time
from typing import BinaryIO, NoReturn

import msgspec
from llguidance import LLMatcher, LLTokenizer

from millrace.engine.grammar.library import raise_error_of, start
from millrace.runtime.process import python_command, python_environment
from millrace.schemas.errors import GrammarError
from millrace.schemas.sampling import Grammar

# Limit of processor time. A grammar near it may need as long for a mask, for which a step waits.
COMPILE_LIMIT_S = 0.5
_WAIT_LIMIT_S = 10.0
_TRIED_STEPS = 16
_NUM_BYTES = 256
_START_LIMIT_S = 30.0
_MODULE = "millrace.engine.grammar.probe"
_READY = b"ready\n"
_TOO_LONG = "The grammar takes too long to compile; make it smaller."
_TOO_DEEP = "The grammar is too deeply nested to be compiled."
_NOT_HERE = "Grammars cannot be compiled here; the worker's log says why."

_encode = msgspec.json.Encoder().encode
_grammar_decoder = msgspec.json.Decoder(Grammar)
_verdict_decoder = msgspec.json.Decoder(str)


class _Helper:
    """Helper process that tries one grammar at a time, once it has started.

    It ends when its input is closed.
    """

    def __init__(self, command: list[str]) -> None:
        self._started = False
        self._process = subprocess.Popen(  # noqa: S603 (this module, in this interpreter)
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=python_environment(),
        )
        self._received = b""

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def verdict(self, grammar: bytes) -> str:
        """Return what is wrong with a grammar (as JSON), "" if nothing.

        Raises GrammarError if the trial fails; the process has ended then.
        """
        if not self._started:
            if self._read_line(_START_LIMIT_S) != _READY:
                self.kill()
                raise GrammarError(_NOT_HERE)
            self._started = True
        stdin = self._process.stdin
        assert stdin is not None
        try:
            stdin.write(grammar + b"\n")
            stdin.flush()
            line = self._read_line(_WAIT_LIMIT_S)
        except BrokenPipeError:
            line = b""
        if line:
            return _verdict_decoder.decode(line)
        hangs = self._process.poll() is None
        self.kill()
        raise GrammarError(_TOO_LONG if hangs else _NOT_HERE)

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()

    def close(self) -> None:
        """Close the process's input, and wait for its end."""
        self._process.communicate()

    def _read_line(self, limit_s: float) -> bytes:
        """Read a line with its end; empty once ``limit_s`` has passed or the process has ended."""
        stdout = self._process.stdout
        assert stdout is not None
        poll = select.poll()
        poll.register(stdout, select.POLLIN)
        deadline = time.monotonic() + limit_s
        while b"\n" not in self._received:
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not poll.poll(left_s * 1e3):
                return b""
            data = os.read(stdout.fileno(), 1 << 16)
            if not data:
                self._process.wait()
                return b""
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        return line + b"\n"


class GrammarProbe:
    """Pool of helper processes that check whether a grammar compiles without harm. Thread-safe.

    It has one process for each concurrent call, and at least ``num_helpers`` from the first grammar
    on, so that later calls do not wait for a start. The processes end with this one.
    """

    def __init__(self, command: list[str] | None = None, *, num_helpers: int = 1) -> None:
        self._command = command or python_command(_MODULE)
        self._num_helpers = num_helpers
        self._lock = threading.Lock()
        self._idle: list[_Helper] = []
        self._num_busy = 0

    def check(self, grammar: Grammar) -> None:
        """Raise GrammarError for a grammar that is invalid, crashes the library or takes too
        long."""
        try:
            text = _encode(grammar)
        except UnicodeEncodeError as error:
            raise GrammarError("The grammar is not valid Unicode text.") from error
        helper = self._take()
        try:
            problem = helper.verdict(text)
        finally:
            with self._lock:
                self._num_busy -= 1
                self._idle.insert(0, helper)
        if problem:
            raise GrammarError(problem)

    def _take(self) -> _Helper:
        """Take a helper for one grammar, the earliest started first."""
        with self._lock:
            idle = [helper for helper in self._idle if helper.alive]
            while not idle or len(idle) + self._num_busy < self._num_helpers:
                idle.append(_Helper(self._command))
            helper, *self._idle = idle
            self._num_busy += 1
        return helper

    def close(self) -> None:
        """End the idle processes."""
        with self._lock:
            idle, self._idle = self._idle, []
        for helper in idle:
            helper.close()


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Serve as a helper: read a grammar per line, write a verdict per line, until ``requests``
    ends.

    Each grammar is tried in a fork, which it may end. The vocabulary is that of single bytes, since
    only the grammar itself is tried.
    """
    tokenizer = LLTokenizer("byte")
    answers.write(_READY)
    answers.flush()
    for line in requests:
        child = os.fork()
        if not child:
            _answer(tokenizer, line, answers)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status:
            answers.write(_encode(_TOO_LONG if status == -signal.SIGPROF else _TOO_DEEP) + b"\n")
            answers.flush()


def _answer(tokenizer: LLTokenizer, grammar: bytes, answers: BinaryIO) -> NoReturn:
    """Write what is wrong with a grammar, and end the process."""
    exit_code = 1
    try:
        # The default action of SIGPROF ends the process even while Python cannot run a handler.
        signal.setitimer(signal.ITIMER_PROF, COMPILE_LIMIT_S)
        verdict = ""
        try:
            _try_out(start(tokenizer, _grammar_decoder.decode(grammar)))
        except GrammarError as error:
            verdict = error.message
        answers.write(_encode(verdict) + b"\n")
        answers.flush()
        exit_code = 0
    finally:
        os._exit(exit_code)


def _try_out(matcher: LLMatcher) -> None:
    """Follow a grammar for a few bytes, since some fail or take long only then."""
    for step in range(_TRIED_STEPS):
        mask = int.from_bytes(matcher.compute_bitmask(), "little") % (1 << _NUM_BYTES)
        if not mask or matcher.is_stopped():
            break
        highest, lowest = mask.bit_length() - 1, (mask & -mask).bit_length() - 1
        matcher.consume_token(lowest if step % 2 else highest)
    raise_error_of(matcher)


def main() -> int:
    """Run the helper process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    serve(sys.stdin.buffer, sys.stdout.buffer)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Engine process: steps while there is work, blocks on its socket while there is none."""

from __future__ import annotations

import collections
import gc
import logging
import select
import signal
import socket
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import msgspec

from millrace.engine.torch_start import import_torch
from millrace.engine.types import (
    DeviceLostError,
    EngineOutput,
    EngineRequest,
)
from millrace.runtime.process import die_with_parent
from millrace.schemas.errors import MillraceError
from millrace.workers.process.wire import (
    Add,
    Broken,
    Command,
    Load,
    Ready,
    Report,
    ResetPrefixes,
    Stepped,
    Stop,
    Unpacker,
    commands_decoder,
    load_decoder,
    pack,
)


class OutputGatherer:
    """Buffer of tokens that the bus side would hold back anyway.

    Tokens in the middle of an answer are held until ``interval_s`` after the last report. An output
    that begins or ends an answer is due at once, and so is every token of a ``watched`` request.
    """

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._told_s = float("-inf")
        self._is_urgent = False
        self._held: dict[tuple[str, int], EngineOutput] = {}
        self._in_the_middle: dict[str, set[int]] = {}
        self._watched: set[str] = set()

    def begin(self, request: EngineRequest) -> None:
        """Note that the engine was given a request."""
        if request.watched:
            self._watched.add(request.request_id)

    def forget(self, request_id: str) -> None:
        """Forget a request that was cancelled."""
        self._watched.discard(request_id)
        self._in_the_middle.pop(request_id, None)

    def add(self, outputs: Iterable[EngineOutput]) -> None:
        """Add the outputs of a step, in order."""
        for output in outputs:
            request_id, choice = key = (output.request_id, output.choice)
            choices = self._in_the_middle.get(request_id)
            if output.finished:
                self._is_urgent = True
                self._end(request_id, choice, choices)
            elif choices is None or choice not in choices:
                self._is_urgent = True
                if output.token_ids:
                    self._in_the_middle.setdefault(request_id, set()).add(choice)
            elif request_id in self._watched:
                self._is_urgent = True
            before = self._held.get(key)
            self._held[key] = output if before is None else _joined(before, output)

    def is_due(self, now_s: float) -> bool:
        """Return whether held outputs are due."""
        if not self._held:
            return False
        return self._is_urgent or now_s - self._told_s >= self._interval_s

    def pop(self, now_s: float) -> list[EngineOutput]:
        """Return all held outputs, one for each choice, and mark them as reported now."""
        self._told_s, self._is_urgent = now_s, False
        held, self._held = self._held, {}
        return list(held.values())

    def _end(self, request_id: str, choice: int, choices: set[int] | None) -> None:
        if choices is not None:
            choices.discard(choice)
        if not choices:
            self.forget(request_id)


def _joined(before: EngineOutput, after: EngineOutput) -> EngineOutput:
    """Join two outputs of a choice; of the earlier one, which is mid-answer, only the tokens are
    new.
    """
    return msgspec.structs.replace(
        after,
        token_ids=before.token_ids + after.token_ids,
        logprobs=before.logprobs + after.logprobs,
        resampled=before.resampled or after.resampled,
        num_proposed_tokens=before.num_proposed_tokens + after.num_proposed_tokens,
        num_accepted_tokens=before.num_accepted_tokens + after.num_accepted_tokens,
    )


if TYPE_CHECKING:
    from millrace.engine.step.engine import Engine

_RECEIVE_BYTES = 1 << 18
_INTEGRITY_INTERVAL_S = 10.0
# Interval at which device times of live requests are reported: the most that is lost if the engine
# dies.
_DEVICE_TIMES_INTERVAL_S = 0.5

logger = logging.getLogger(__name__)


class EngineLink:
    """Engine's end of the socket pair. Raises EOFError once the bus side is gone."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._unpacker = Unpacker()
        self._payloads: collections.deque[bytes] = collections.deque()

    def receive_load(self) -> Load:
        while not self._payloads:
            self._read(block=True)
        return load_decoder.decode(self._payloads.popleft())

    def receive_commands(self, *, block: bool) -> list[Command]:
        """Return the received commands; with ``block``, wait for at least one message."""
        self._read(block=block and not self._payloads)
        while block and not self._payloads:
            self._read(block=True)
        commands: list[Command] = []
        while self._payloads:
            commands += commands_decoder.decode(self._payloads.popleft())
        return commands

    def wait(self, timeout_s: float | None, wake_fd: int) -> bool:
        """Wait until there is data, and return whether there is.

        Also returns when ``wake_fd`` is readable or after ``timeout_s`` (None: no timeout).
        """
        if self._payloads:
            return True
        own_fd = self._sock.fileno()
        return own_fd in select.select([own_fd, wake_fd], [], [], timeout_s)[0]

    def send(self, report: Report) -> None:
        """Send a report. Wait for the reader when it is far behind, so that its memory stays
        bounded.
        """
        try:
            self._sock.sendall(pack(report))
        except OSError as error:
            raise EOFError from error

    def _read(self, *, block: bool) -> None:
        try:
            data = self._sock.recv(_RECEIVE_BYTES, 0 if block else socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError as error:
            raise EOFError from error
        if not data:
            raise EOFError
        self._payloads.extend(self._unpacker.feed(data))


def drive(engine: Engine, link: EngineLink, gather_s: float = 0.0) -> NoReturn:
    """Step as long as the bus side is there, and report.

    There is one report for each step, or one for all steps within ``gather_s`` in which no answer
    began or ended. There is also one before a step if requests were cancelled.

    Raises:
        EOFError: the bus side is gone.
    """
    checked_at = told_at = time.monotonic()
    gathered = OutputGatherer(gather_s)
    while True:
        if not engine.has_work and time.monotonic() - checked_at > _INTEGRITY_INTERVAL_S:
            engine.check_integrity()
            checked_at = time.monotonic()
        while not engine.has_work and not link.wait(engine.rest(), engine.wake_fd):
            pass
        commands = link.receive_commands(block=not engine.has_work)
        for command in commands:
            match command:
                case Add(request):
                    engine.add(request)
                    gathered.begin(request)
                case Stop(request_id):
                    engine.cancel(request_id)
                    gathered.forget(request_id)
                case ResetPrefixes():
                    engine.reset_prefix_cache()
        if any(isinstance(command, Stop) for command in commands) or not engine.has_work:
            # Resources that a cancel freed are reported before the next step.
            link.send(_report(engine, gathered.pop(time.monotonic()), live=False))
        if engine.has_work:
            gathered.add(engine.step())
            now_s = time.monotonic()
            is_time = now_s - told_at >= _DEVICE_TIMES_INTERVAL_S
            if is_time or gathered.is_due(now_s) or not engine.has_work:
                link.send(_report(engine, gathered.pop(now_s), live=is_time))
            if is_time:
                told_at = now_s


def _report(engine: Engine, outputs: list[EngineOutput], *, live: bool) -> Stepped:
    prefixes = engine.pop_prefix_changes()
    return Stepped(outputs, engine.stats(), prefixes, engine.pop_device_times(live=live))


def serve(fd: int, parent_pid: int) -> int:
    """Load the model that the bus side names, then run it. Return the process's exit code."""
    die_with_parent(parent_pid)
    # The bus side decides when this process ends: it closes the socket.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    link = EngineLink(socket.socket(fileno=fd))
    try:
        load = link.receive_load()
        engine = _load(load)
        link.send(
            Ready(engine.stats(), engine.config, engine.device_uuid, engine.transfer_endpoint)
        )
        gc.collect()
        gc.freeze()
        drive(engine, link, load.gather_s)
    except EOFError:
        return 0
    except MillraceError as error:
        return _break(link, error.message)
    except (Exception, DeviceLostError) as error:
        logger.exception("the engine failed")
        return _break(link, f"the engine failed: {type(error).__name__}: {error}")


def _load(load: Load) -> Engine:
    from millrace.engine.threads.choice import choose_threads

    logger.info("the engine computes with %s", choose_threads(load.config, load.shared))
    # Imported late: torch reads the thread settings when it is imported.
    import_torch()
    from millrace.engine.step.engine import Engine

    return Engine.load(Path(load.path), load.config, among_others=True)


def _break(link: EngineLink, message: str) -> int:
    try:
        link.send(Broken(message))
    except EOFError:
        logger.warning("the bus side has closed its socket and will not learn why the engine ended")
    return 1

"""Run of a load: query the server, start the load processes, collect their results."""

from __future__ import annotations

import datetime
import multiprocessing
import random
import sys
import time
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

import msgspec
import uvloop

from millrace.bench.clients.client import LoadClient
from millrace.bench.load import LoadOutcome, LoadProgress, Share, load_process
from millrace.bench.prompts import prompts_of, random_words
from millrace.bench.report.measure import report_of
from millrace.bench.report.report import LoadReport
from millrace.bench.settings import LoadError, LoadSettings

_START_DELAY_S = 0.3
_START_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 20.0
_CALIBRATION_WORDS = (16, 96)
_SPAWN = multiprocessing.get_context("spawn")
_decode = msgspec.msgpack.Decoder(LoadProgress | LoadOutcome).decode


def run_load(
    settings: LoadSettings, *, keep_samples: bool = False, progress: bool = False
) -> LoadReport:
    """Send the load and return the measurements.

    Ctrl-C ends it early, with a report of the results so far. ``progress`` shows a line on stderr.
    Raises LoadError if the server does not answer a first request, ConfigError for an invalid data
    set.
    """
    prompts_of(settings)
    settings = uvloop.run(_prepare(settings))
    return _Run(settings, keep_samples=keep_samples, progress=progress).run()


async def _prepare(settings: LoadSettings) -> LoadSettings:
    """Find the model, request one answer, and measure the tokens per word."""
    client = LoadClient(settings)
    try:
        if not settings.model:
            settings = msgspec.structs.replace(settings, model=await client.first_model())
            client.close()
            client = LoadClient(settings)
        first = await client.ask(prompts_of(settings).prompt(0))
        if first.error:
            raise LoadError(f"{settings.url} did not answer a first request: {first.error}")
        if settings.dataset:
            return settings
        few, many = _CALIBRATION_WORDS
        source = random.Random(settings.seed)
        counts = [
            await client.count_prompt(" ".join(random_words(source, count)))
            for count in _CALIBRATION_WORDS
        ]
    finally:
        client.close()
    if counts[0] is None or counts[1] is None or counts[1] <= counts[0]:
        return settings
    per_word = (counts[1] - counts[0]) / (many - few)
    around = max(0.0, counts[0] - per_word * few)
    return msgspec.structs.replace(settings, tokens_per_word=per_word, tokens_around=around)


class _Run:
    """Owner of the load processes: none of them outlives ``run``."""

    def __init__(self, settings: LoadSettings, *, keep_samples: bool, progress: bool) -> None:
        self._settings = settings
        self._keep_samples = keep_samples
        self._shows_progress = progress
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        self._progress: dict[Connection, LoadProgress] = {}
        self._outcomes: list[LoadOutcome] = []
        self._start_s = 0.0

    def run(self) -> LoadReport:
        try:
            self._start()
            started_at = datetime.datetime.now(datetime.UTC)
            interrupted = self._gather()
        finally:
            for process in self._processes:
                process.kill()
                process.join()
            if self._shows_progress:
                sys.stderr.write("\r\x1b[K")
        return report_of(
            self._settings,
            [sample for outcome in self._outcomes for sample in outcome.samples],
            [outcome.health for outcome in self._outcomes],
            max(outcome.stopped_s for outcome in self._outcomes),
            started_at,
            interrupted=interrupted,
            keep_samples=self._keep_samples,
        )

    def _start(self) -> None:
        for rank in range(self._settings.num_processes):
            ours, theirs = _SPAWN.Pipe()
            share = Share(settings=self._settings, rank=rank)
            process = _SPAWN.Process(target=load_process, args=(share, theirs), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
        for pipe in self._pipes:
            if not pipe.poll(_START_TIMEOUT_S):
                raise LoadError("a load process did not start in time")
            self._receive(pipe)
        self._start_s = time.perf_counter() + _START_DELAY_S
        for pipe in self._pipes:
            pipe.send_bytes(repr(self._start_s).encode())

    def _gather(self) -> bool:
        """Wait for all outcomes; return True if the user interrupted the wait."""
        waiting = set(self._pipes)
        give_up_s: float | None = None
        while waiting:
            try:
                for pipe in wait(list(waiting), timeout=0.25):
                    assert isinstance(pipe, Connection)
                    self._take(pipe, waiting)
                self._show()
            except KeyboardInterrupt:
                if give_up_s is not None:
                    raise
                give_up_s = time.monotonic() + _STOP_TIMEOUT_S
                for pipe in waiting:
                    pipe.send_bytes(b"stop")
            if give_up_s is not None and time.monotonic() > give_up_s:
                raise LoadError("the load processes did not stop in time")
        return give_up_s is not None

    def _take(self, pipe: Connection, waiting: set[Connection]) -> None:
        message = _decode(self._receive(pipe))
        if isinstance(message, LoadOutcome):
            self._outcomes.append(message)
            waiting.discard(pipe)
        else:
            self._progress[pipe] = message

    def _receive(self, pipe: Connection) -> bytes:
        try:
            return pipe.recv_bytes()
        except EOFError as error:
            raise LoadError("a load process ended before its time; its error is above") from error

    def _show(self) -> None:
        if not self._shows_progress:
            return
        all_of_them = self._progress.values()
        sent = sum(one.num_sent for one in all_of_them)
        ended = sum(one.num_ended for one in all_of_them)
        failed = sum(one.num_failed for one in all_of_them)
        at_s = max(0.0, time.perf_counter() - self._start_s)
        sys.stderr.write(
            f"\r\x1b[K{at_s:6.1f} s   {sent} sent   {sent - ended} in flight   "
            f"{ended - failed} done   {failed} failed"
        )
        sys.stderr.flush()

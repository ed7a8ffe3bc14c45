"""Batch of requests that run straight on the engine, without a bus."""

from __future__ import annotations

import resource
import statistics
import threading
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Protocol

import msgspec

from millrace.engine.offline.generated import Generated, OfflineCompletion, OfflineRequest
from millrace.engine.types import EngineOutput, EngineRequest, EngineStats
from millrace.registry.tokenizers.tokenizer import Tokenizer
from millrace.schemas.errors import MillraceError


class Stepping(Protocol):
    """Interface of the engine that a batch uses."""

    def add(self, request: EngineRequest) -> None: ...

    def cancel(self, request_id: str) -> None: ...

    def step(self) -> list[EngineOutput]: ...

    def stats(self) -> EngineStats: ...


class EngineClosedError(MillraceError, code="engine_closed"):
    """Error of a call to an LLM after ``close``."""

    def __init__(self) -> None:
        super().__init__("This LLM is closed. Make another one.")


class BatchSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Summary of a batch.

    TTFT is measured from when the engine got a request; TPOT is the mean time per token after the
    first. Both are means over the completions that have them, 0 if none has. ``prefix_hit_tokens``
    is the part of ``prompt_tokens`` that was found in the KV cache. ``peak_rss_bytes`` is the peak
    memory of this process.
    """

    tokens_per_s: float
    mean_ttft_ms: float
    p50_ttft_ms: float
    mean_tpot_ms: float
    num_requests: int
    num_failed: int
    num_cancelled: int
    prompt_tokens: int
    prefix_hit_tokens: int
    completion_tokens: int
    num_preemptions: int
    wall_s: float
    peak_rss_bytes: int


class OfflineBatch:
    """Batch that runs up to ``max_batch`` prepared requests at a time.

    Several iterations may be open at a time: each step computes the requests of all of them, and
    each iteration gets the answers to its own. Leaving an iteration early cancels its requests.
    Calls of several threads take turns, one step each. Ids of requests must differ.
    """

    def __init__(
        self,
        engine: Stepping,
        tokenizer: Tokenizer,
        max_batch: int,
        monotonic: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._engine: Stepping | None = engine
        self._tokenizer = tokenizer
        self._max_batch = max_batch
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._running: dict[str, Generated] = {}
        self._left: list[Generated] = []
        self._cancelling: list[Generated] = []
        self._ttft_s = array("d")
        self._tpot_s = array("d")
        self._num_requests = self._num_failed = self._num_cancelled = 0
        self._prompt_tokens = self._prefix_hit_tokens = self._completion_tokens = 0
        self._wall_s = 0.0
        self.num_tokens = 0
        """Tokens that the engine has made for requests of this batch."""

    def run(self, requests: Iterable[OfflineRequest]) -> Iterator[Generated]:
        """Yield each answer when it ends."""
        for live in self.steps(requests):
            for generated in live:
                if generated.ended:
                    yield generated

    def steps(self, requests: Iterable[OfflineRequest]) -> Iterator[list[Generated]]:
        """Yield, after each step, the answers that were unfinished before it.

        Raises EngineClosedError.
        """
        waiting = iter(requests)
        live: list[Generated] = []
        started_s = self._monotonic()
        try:
            while True:
                with self._lock:
                    self._cancel_left()
                    room = self._max_batch - len(self._running)
                    live += map(self._add, islice(waiting, room))
                    if room and not live:
                        return
                    # Another iteration's step may have ended some of these.
                    if not any(generated.ended for generated in live):
                        self._step()
                        self._wall_s = self._monotonic() - started_s
                yield live
                live = [generated for generated in live if not generated.ended]
        finally:
            # Cancelled with the next step, since garbage collection may end an iteration during a
            # step.
            self._left += live

    def close(self) -> None:
        """Release the engine. Open iterations raise EngineClosedError."""
        with self._lock:
            self._engine = None
            self._running.clear()

    def stats(self) -> EngineStats:
        """Return the engine's gauges and counters."""
        with self._lock:
            self._cancel_left()
            return self._open_engine.stats()

    def summary(self, num_refused: int = 0) -> BatchSummary:
        """Summarize all requests so far.

        ``num_refused`` counts requests that failed before they ran.
        """
        return BatchSummary(
            tokens_per_s=round(self._completion_tokens / self._wall_s, 2) if self._wall_s else 0.0,
            mean_ttft_ms=_mean_ms(self._ttft_s),
            p50_ttft_ms=_median_ms(self._ttft_s),
            mean_tpot_ms=_mean_ms(self._tpot_s),
            num_requests=self._num_requests + num_refused,
            num_failed=self._num_failed + num_refused,
            num_cancelled=self._num_cancelled,
            prompt_tokens=self._prompt_tokens,
            prefix_hit_tokens=self._prefix_hit_tokens,
            completion_tokens=self._completion_tokens,
            num_preemptions=self._open_engine.stats().num_preemptions,
            wall_s=round(self._wall_s, 4),
            peak_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        )

    @property
    def _open_engine(self) -> Stepping:
        if self._engine is None:
            raise EngineClosedError
        return self._engine

    def _add(self, request: OfflineRequest) -> Generated:
        generated = Generated(request, self._tokenizer, self._monotonic())
        self._open_engine.add(request.engine_request(self._tokenizer.eos_token_ids))
        self._running[request.job.request_id] = generated
        if request.cancel_after_tokens == 0:
            self._cancelling.append(generated)
        return generated

    def _step(self) -> None:
        outputs = self._open_engine.step()
        now_s = self._monotonic()
        ended: list[Generated] = []
        for output in outputs:
            self.num_tokens += len(output.token_ids)
            generated = self._running.get(output.request_id)
            if generated is not None and generated.add_output(output, now_s):
                ended.append(generated)
        cancelling, self._cancelling = self._cancelling, []
        for generated in cancelling:
            if not generated.ended:
                generated.cancel()
                ended.append(generated)
        for generated in ended:
            self._remove(generated)
            self._count(generated)

    def _cancel_left(self) -> None:
        """Cancel the requests of iterations that were left early."""
        while self._left:
            generated = self._left.pop()
            if not generated.ended and self._engine is not None:
                generated.cancel()
                self._remove(generated)

    def _remove(self, generated: Generated) -> None:
        request_id = generated.request.job.request_id
        del self._running[request_id]
        if not generated.ended_in_engine:
            self._open_engine.cancel(request_id)

    def _count(self, generated: Generated) -> None:
        self._num_requests += 1
        self._num_failed += generated.error is not None
        self._num_cancelled += generated.cancelled
        self._prompt_tokens += len(generated.request.job.prompt_token_ids or ())
        self._prefix_hit_tokens += generated.num_cached_tokens
        for choice in generated.choices:
            self._count_choice(choice, generated.added_s)

    def _count_choice(self, choice: OfflineCompletion, added_s: float) -> None:
        num_tokens = len(choice.token_ids)
        self._completion_tokens += num_tokens
        if num_tokens:
            self._ttft_s.append(choice.first_token_s - added_s)
        if num_tokens > 1:
            self._tpot_s.append((choice.last_token_s - choice.first_token_s) / (num_tokens - 1))


def _median_ms(durations_s: Sequence[float]) -> float:
    return round(1e3 * statistics.median(durations_s), 3) if durations_s else 0.0


def _mean_ms(durations_s: Sequence[float]) -> float:
    return round(1e3 * sum(durations_s) / len(durations_s), 3) if durations_s else 0.0

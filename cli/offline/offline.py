"""A batch of requests straight on the engine, without any bus."""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Protocol

import msgspec

from millrace.cli.offline.generated import Choice, Generated, OfflineRequest
from millrace.engine.types import EngineOutput, EngineRequest, EngineStats
from millrace.registry.tokenizers.tokenizer import Tokenizer


class Stepping(Protocol):
    """What is asked of the engine."""

    @property
    def has_work(self) -> bool: ...

    def add(self, request: EngineRequest) -> None: ...

    def cancel(self, request_id: str) -> None: ...

    def step(self) -> list[EngineOutput]: ...

    def stats(self) -> EngineStats: ...


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """How a batch went. TTFT is from when the engine got a request, TPOT the mean time per token
    after the first; both are means over the completions that have them, 0 if none has.

    Of ``prompt_tokens``, ``prefix_hit_tokens`` were found in the KV cache. ``peak_rss_bytes`` is
    the most memory that this process ever had.
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
    """Runs prepared requests, ``max_batch`` of them at a time, the next as soon as one ends.

    Ids must differ. The engine must be idle and is idle again when ``run`` is through.
    """

    def __init__(
        self,
        engine: Stepping,
        tokenizer: Tokenizer,
        max_batch: int,
        monotonic: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._max_batch = max_batch
        self._monotonic = monotonic
        self._running: dict[str, Generated] = {}
        self._cancelling: list[Generated] = []
        self._ttft_s: list[float] = []
        self._tpot_s: list[float] = []
        self._num_requests = self._num_failed = self._num_cancelled = 0
        self._prompt_tokens = self._prefix_hit_tokens = self._completion_tokens = 0
        self._wall_s = 0.0

    def run(
        self,
        requests: Sequence[OfflineRequest],
        on_tokens: Callable[[int], object] = lambda _: None,
    ) -> Iterator[Generated]:
        """Each answer as it ends; ``on_tokens`` hears of the tokens of each step."""
        waiting = iter(requests)
        started_s = self._monotonic()
        while True:
            for request in islice(waiting, self._max_batch - len(self._running)):
                self._add(request)
            if not self._running:
                break
            outputs = self._engine.step()
            on_tokens(sum(len(output.token_ids) for output in outputs))
            yield from self._add_outputs(outputs)
            self._wall_s = self._monotonic() - started_s

    def summary(self, num_refused: int = 0) -> Summary:
        """How what has run went; ``num_refused`` requests besides failed before they could."""
        return Summary(
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
            num_preemptions=self._engine.stats().num_preemptions,
            wall_s=round(self._wall_s, 4),
            peak_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        )

    def _add(self, request: OfflineRequest) -> None:
        generated = Generated(request, self._tokenizer, self._monotonic())
        self._running[request.job.request_id] = generated
        if request.cancel_after_tokens == 0:
            self._cancelling.append(generated)
        self._engine.add(request.engine_request(self._tokenizer.eos_token_ids))

    def _add_outputs(self, outputs: Sequence[EngineOutput]) -> Iterator[Generated]:
        now_s = self._monotonic()
        ended: list[Generated] = []
        for output in outputs:
            generated = self._running.get(output.request_id)
            if generated is not None and generated.add_output(output, now_s):
                ended.append(generated)
        cancelling, self._cancelling = self._cancelling, []
        for generated in cancelling:
            if not generated.ended:
                generated.cancel()
                ended.append(generated)
        for generated in ended:
            request_id = generated.request.job.request_id
            del self._running[request_id]
            if not generated.ended_in_engine:
                self._engine.cancel(request_id)
            self._count(generated)
            yield generated

    def _count(self, generated: Generated) -> None:
        self._num_requests += 1
        self._num_failed += generated.error is not None
        self._num_cancelled += generated.cancelled
        self._prompt_tokens += len(generated.request.job.prompt_token_ids or ())
        self._prefix_hit_tokens += generated.num_cached_tokens
        for choice in generated.choices:
            self._count_choice(choice, generated.added_s)

    def _count_choice(self, choice: Choice, added_s: float) -> None:
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

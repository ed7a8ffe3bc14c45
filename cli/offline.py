"""A batch of requests straight on the engine, without any bus."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

import msgspec

from registry.tokenizer import Tokenizer
from schemas.frames import FinishReason, TokenLogprob
from schemas.jobs import Job
from workers.engine.types import EngineOutput, EngineRequest
from workers.text import TextStream


class Stepping(Protocol):
    """What is asked of the engine."""

    @property
    def has_work(self) -> bool: ...

    def add(self, request: EngineRequest) -> None: ...

    def cancel(self, request_id: str) -> None: ...

    def step(self) -> list[EngineOutput]: ...


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """How a batch went. TTFT is from when the engine got a request, TPOT the mean time per token
    after the first; both are means over the requests that have them, 0 if none has."""

    tokens_per_s: float
    mean_ttft_ms: float
    p50_ttft_ms: float
    mean_tpot_ms: float
    num_requests: int
    num_failed: int
    completion_tokens: int
    wall_s: float


@dataclass
class Generated:
    """One request's answer as it grows. Times are monotonic seconds."""

    job: Job
    stream: TextStream
    added_s: float
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    first_token_s: float = 0.0
    last_token_s: float = 0.0
    finish_reason: FinishReason | None = None
    error: tuple[str, str] | None = None

    @property
    def ended(self) -> bool:
        return self.finish_reason is not None or self.error is not None

    def take(self, output: EngineOutput, now_s: float) -> None:
        """Add what a step made. Tokens behind a stop string are dropped."""
        for at, token_id in enumerate(output.token_ids):
            text, stopped = self.stream.push(token_id)
            self.text.append(text)
            self.token_ids.append(token_id)
            self.logprobs += output.logprobs[at : at + 1]
            self.last_token_s = now_s
            if len(self.token_ids) == 1:
                self.first_token_s = now_s
            if stopped:
                self.finish_reason = FinishReason.STOP
                return
        self.error = output.error
        self.finish_reason = output.finish_reason
        if self.ended:
            self.text.append(self.stream.flush())


class OfflineBatch:
    """Runs prepared jobs, ``max_batch`` of them at a time, the next as soon as one ends.

    Job ids must differ. The engine must be idle and is idle again when ``run`` is through.
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
        self._ttft_s: list[float] = []
        self._tpot_s: list[float] = []
        self._num_requests = self._num_failed = self._completion_tokens = 0
        self._wall_s = 0.0

    def run(
        self, jobs: Sequence[Job], on_tokens: Callable[[int], object] = lambda _: None
    ) -> Iterator[Generated]:
        """Each answer as it ends; ``on_tokens`` hears of the tokens of each step."""
        waiting = iter(jobs)
        started_s = self._monotonic()
        while True:
            for job in islice(waiting, self._max_batch - len(self._running)):
                self._add(job)
            if not self._running:
                break
            outputs = self._engine.step()
            on_tokens(sum(len(output.token_ids) for output in outputs))
            yield from self._take(outputs)
            self._wall_s = self._monotonic() - started_s

    def summary(self) -> Summary:
        """How what has run went."""
        return Summary(
            tokens_per_s=round(self._completion_tokens / self._wall_s, 2) if self._wall_s else 0.0,
            mean_ttft_ms=_mean_ms(self._ttft_s),
            p50_ttft_ms=_median_ms(self._ttft_s),
            mean_tpot_ms=_mean_ms(self._tpot_s),
            num_requests=self._num_requests,
            num_failed=self._num_failed,
            completion_tokens=self._completion_tokens,
            wall_s=round(self._wall_s, 4),
        )

    def _add(self, job: Job) -> None:
        assert job.prompt_token_ids is not None
        stream = TextStream(self._tokenizer, job.sampling, job.prompt_token_ids)
        self._running[job.request_id] = Generated(job, stream, self._monotonic())
        self._engine.add(
            EngineRequest(
                request_id=job.request_id,
                prompt_token_ids=job.prompt_token_ids,
                sampling=job.sampling,
                eos_token_ids=self._tokenizer.eos_token_ids,
            )
        )

    def _take(self, outputs: Sequence[EngineOutput]) -> Iterator[Generated]:
        now_s = self._monotonic()
        for output in outputs:
            generated = self._running.get(output.request_id)
            if generated is None:
                continue
            generated.take(output, now_s)
            if generated.ended:
                del self._running[output.request_id]
                if not output.finished:
                    self._engine.cancel(output.request_id)
                self._count(generated)
                yield generated

    def _count(self, generated: Generated) -> None:
        num_tokens = len(generated.token_ids)
        self._num_requests += 1
        self._num_failed += generated.error is not None
        self._completion_tokens += num_tokens
        if num_tokens:
            self._ttft_s.append(generated.first_token_s - generated.added_s)
        if num_tokens > 1:
            decode_s = generated.last_token_s - generated.first_token_s
            self._tpot_s.append(decode_s / (num_tokens - 1))


def _median_ms(durations_s: Sequence[float]) -> float:
    return round(1e3 * statistics.median(durations_s), 3) if durations_s else 0.0


def _mean_ms(durations_s: Sequence[float]) -> float:
    return round(1e3 * sum(durations_s) / len(durations_s), 3) if durations_s else 0.0

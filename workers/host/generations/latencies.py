"""Latencies of requests on this worker, counted as they happen and read at a scrape."""

from __future__ import annotations

from collections import Counter, defaultdict

from millrace.runtime.histogram import DURATION_S, FIRST_TOKEN_S, PER_TOKEN_S, Histogram
from millrace.runtime.tracing import recorded_trace_id
from millrace.schemas.records import Status
from millrace.workers.host.generations.state import GenerationTiming

_NS_PER_S = 1e9


class RequestTimes:
    """Latencies of the attempts on one worker; a migrated request counts at each worker that ran
    it.

    ``first_token_s`` and ``engine_wait_s`` begin with the dispatch, ``prefill_s`` when the engine
    took the request into its batch. ``gap_s`` are the times between tokens; tokens of the same step
    and request share one gap. ``ended`` counts requests by their final status.

    Within a step, tokens are counted by the time of their request's previous token. Most requests
    share that time, so a token costs next to nothing here.
    """

    def __init__(self) -> None:
        self.first_token_s = Histogram(FIRST_TOKEN_S)
        self.gap_s = Histogram(PER_TOKEN_S)
        self.engine_wait_s = Histogram(DURATION_S)
        self.prefill_s = Histogram(DURATION_S)
        self.decode_s = Histogram(DURATION_S)
        self.ended: Counter[Status] = Counter()
        self._num_since: defaultdict[int, int] = defaultdict(int)

    def note_tokens(
        self, timing: GenerationTiming, num_tokens: int, before_ns: int, traceparent: str = ""
    ) -> None:
        """Record ``num_tokens`` new tokens of a generation.

        Args:
            num_tokens: the number of new tokens.
            before_ns: the time of the token before them; 0 if there was none.
            traceparent: the trace of the request.
        """
        if before_ns and num_tokens == 1:
            self._num_since[before_ns] += 1
        elif before_ns:
            gap_s = (timing.last_token_ns - before_ns) / _NS_PER_S
            self.gap_s.add(gap_s / num_tokens, num_tokens)
        elif timing.first_token_ns:
            seconds = (timing.first_token_ns - timing.accepted_ns) / _NS_PER_S
            self.first_token_s.add(seconds, trace_id=recorded_trace_id(traceparent))

    def end_step(self, now_ns: int) -> None:
        """Record that all tokens of a step have been noted."""
        for before_ns, num_tokens in self._num_since.items():
            self.gap_s.add((now_ns - before_ns) / _NS_PER_S, num_tokens)
        self._num_since.clear()

    def add_end(self, timing: GenerationTiming, status: Status, traceparent: str = "") -> None:
        """Record that a generation has ended here."""
        self.ended[status] += 1
        if not timing.started_ns:
            return
        seconds = (timing.started_ns - timing.accepted_ns) / _NS_PER_S
        trace_id = recorded_trace_id(traceparent)
        self.engine_wait_s.add(seconds, trace_id=trace_id)
        if not timing.first_token_ns:
            return
        seconds = (timing.first_token_ns - timing.started_ns) / _NS_PER_S
        self.prefill_s.add(seconds, trace_id=trace_id)
        seconds = (timing.last_token_ns - timing.first_token_ns) / _NS_PER_S
        self.decode_s.add(seconds, trace_id=trace_id)

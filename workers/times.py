"""How long requests took on this worker, counted where it happens and read at a scrape."""

from __future__ import annotations

from collections import Counter

from bus.tally import DURATION_S, FIRST_TOKEN_S, PER_TOKEN_S, Tally
from schemas.records import Status
from workers.generation import Generation

_NS_PER_S = 1e9


class RequestTimes:
    """Of the runs on one worker: a request that moved is told of by each worker that ran it.

    ``first_token_s`` and ``queue_s`` begin with the dispatch, ``prefill_s`` when the engine took
    the request into its batch. ``gap_s`` are the times between tokens, and those that one step made
    share theirs. ``ended`` counts by how a request ended.
    """

    def __init__(self) -> None:
        self.first_token_s = Tally(FIRST_TOKEN_S)
        self.gap_s = Tally(PER_TOKEN_S)
        self.queue_s = Tally(DURATION_S)
        self.prefill_s = Tally(DURATION_S)
        self.decode_s = Tally(DURATION_S)
        self.ended: Counter[Status] = Counter()

    def add_tokens(self, generation: Generation, before_ns: int, num_tokens: int) -> None:
        """It has got ``num_tokens`` more just now, ``before_ns`` being when it had got the last
        before that, 0 if these are its first."""
        if before_ns:
            gap_s = (generation.last_token_ns - before_ns) / _NS_PER_S
            self.gap_s.add(gap_s / num_tokens, num_tokens)
        else:
            self.first_token_s.add((generation.first_token_ns - generation.accepted_ns) / _NS_PER_S)

    def add_end(self, generation: Generation) -> None:
        """It has ended here."""
        assert generation.outcome is not None
        self.ended[generation.outcome.status] += 1
        if not generation.started_ns:
            return
        self.queue_s.add((generation.started_ns - generation.accepted_ns) / _NS_PER_S)
        if not generation.first_token_ns:
            return
        self.prefill_s.add((generation.first_token_ns - generation.started_ns) / _NS_PER_S)
        self.decode_s.add((generation.last_token_ns - generation.first_token_ns) / _NS_PER_S)

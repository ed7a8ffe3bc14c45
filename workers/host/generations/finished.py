"""Memory of finished requests, bounded in time and size."""

from __future__ import annotations

from collections import OrderedDict

from millrace.runtime.clock import Clock
from millrace.workers.host.generations.generation import Generation

_MAX_GENERATIONS = 8_192
_MAX_NUMBERS = 4_000_000
_MAX_FLOORS = 8_192
# A log-probability is an object, with a pair for each alternative.
_NUMBERS_PER_LOGPROB = 4
# Each token of an answer that is split adds to content, to reasoning, and maybe to a call.
_NUMBERS_PER_PART = 3


class FinishedGenerations:
    """Ended generations, oldest first, so that a reader who missed frames can get them again.

    Each is kept for ``memory_s``. If there are too many, the oldest are dropped earlier.
    """

    def __init__(self, clock: Clock, memory_s: float) -> None:
        self._clock = clock
        self._memory_s = memory_s
        self._entries: OrderedDict[str, tuple[Generation, float]] = OrderedDict()
        self._num_numbers = 0

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, generation: Generation) -> None:
        self.discard(generation.request_id)
        self._num_numbers += _size(generation)
        until_s = self._clock.monotonic() + self._memory_s
        self._entries[generation.request_id] = (generation, until_s)
        self._shrink()

    def get(self, request_id: str) -> Generation | None:
        self._shrink()
        entry = self._entries.get(request_id)
        return None if entry is None else entry[0]

    def discard(self, request_id: str) -> None:
        entry = self._entries.pop(request_id, None)
        if entry is not None:
            self._num_numbers -= _size(entry[0])

    def _shrink(self) -> None:
        now_s = self._clock.monotonic()
        while self._entries:
            request_id, (_, until_s) = next(iter(self._entries.items()))
            over = len(self._entries) > _MAX_GENERATIONS or self._num_numbers > _MAX_NUMBERS
            if until_s > now_s and not over:
                return
            self.discard(request_id)


class EpochFloors:
    """Newest known epoch of each recently superseded request.

    A dispatch that was overtaken on its way must not start an older attempt.
    """

    def __init__(self) -> None:
        self._floors: OrderedDict[str, int] = OrderedDict()

    def raise_to(self, request_id: str, epoch: int) -> None:
        self._floors[request_id] = max(epoch, self._floors.pop(request_id, 0))
        if len(self._floors) > _MAX_FLOORS:
            self._floors.popitem(last=False)

    def get(self, request_id: str) -> int:
        return self._floors.get(request_id, 0)


def _size(generation: Generation) -> int:
    """Return the memory of a generation, counted in token ids and embedding numbers."""
    sampling = generation.job.sampling
    return (
        len(generation.prompt_token_ids)
        + generation.output.num_completion_tokens
        * (1 if generation.output.answer is None else 1 + _NUMBERS_PER_PART)
        + len(generation.output.embedding) // 4
        + _NUMBERS_PER_LOGPROB
        * (
            len(generation.output.logprobs) * (1 + (sampling.logprobs or 0))
            + len(generation.output.prompt_logprobs) * (1 + (sampling.prompt_logprobs or 0))
        )
    )

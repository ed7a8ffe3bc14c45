"""What steps made, gathered so that the bus side is not woken for each."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from millrace.engine.types import EngineOutput, EngineRequest


class OutputGatherer:
    """Holds back tokens that the bus side would hold back itself: those in the middle of an answer,
    for ``interval_s`` since it was last told something. Whatever begins or ends one is due at once,
    and so is every token of a ``watched`` request.
    """

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._told_s = float("-inf")
        self._is_urgent = False
        self._held: dict[tuple[str, int], EngineOutput] = {}
        self._in_the_middle: dict[str, set[int]] = {}
        self._watched: set[str] = set()

    def begin(self, request: EngineRequest) -> None:
        """The engine was given a request."""
        if request.watched:
            self._watched.add(request.request_id)

    def forget(self, request_id: str) -> None:
        """A request was cancelled."""
        self._watched.discard(request_id)
        self._in_the_middle.pop(request_id, None)

    def add(self, outputs: Iterable[EngineOutput]) -> None:
        """What a step made, in order."""
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
        """Whether something is held that is not to be held any longer."""
        if not self._held:
            return False
        return self._is_urgent or now_s - self._told_s >= self._interval_s

    def pop(self, now_s: float) -> list[EngineOutput]:
        """All that is held, one output a choice; it is told now."""
        self._told_s, self._is_urgent = now_s, False
        held, self._held = self._held, {}
        return list(held.values())

    def _end(self, request_id: str, choice: int, choices: set[int] | None) -> None:
        if choices is not None:
            choices.discard(choice)
        if not choices:
            self.forget(request_id)


def _joined(before: EngineOutput, after: EngineOutput) -> EngineOutput:
    """Two outputs of a choice as one; of the former, which is from the middle of an answer, only
    its tokens are news."""
    return msgspec.structs.replace(
        after,
        token_ids=before.token_ids + after.token_ids,
        logprobs=before.logprobs + after.logprobs,
        resampled=before.resampled or after.resampled,
        num_proposed_tokens=before.num_proposed_tokens + after.num_proposed_tokens,
        num_accepted_tokens=before.num_accepted_tokens + after.num_accepted_tokens,
    )

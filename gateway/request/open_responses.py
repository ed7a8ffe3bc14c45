"""The responses of one gateway that are not over."""

from __future__ import annotations

from typing import Generic, TypeVar

from millrace.gateway.request.index import RequestState
from millrace.gateway.request.response_reader import ResponseReader
from millrace.runtime.tasks import Tasks

_ResponseT = TypeVar("_ResponseT", bound=ResponseReader)


class OpenResponses(Generic[_ResponseT]):
    """Owns the responses whose end was not delivered yet, the ``copies`` that other clients read,
    and the background ``tasks`` that run for them."""

    def __init__(self) -> None:
        self._responses: dict[str, tuple[_ResponseT, RequestState | None]] = {}
        self.copies: set[_ResponseT] = set()
        self.tasks = Tasks()

    def get(self, request_id: str) -> _ResponseT | None:
        """The response itself, not a copy."""
        known = self._responses.get(request_id)
        return None if known is None else known[0]

    def state_of(self, request_id: str) -> RequestState | None:
        """What another gateway has to know of such a response, once it is accepted."""
        known = self._responses.get(request_id)
        return None if known is None else known[1]

    def all(self) -> list[_ResponseT]:
        return [*(response for response, _ in self._responses.values()), *self.copies]

    def add(self, response: _ResponseT, state: RequestState | None) -> None:
        """``state`` is None until others may go on with it."""
        self._responses[response.request_id] = (response, state)

    def remove(self, response: _ResponseT) -> None:
        """It is over, or another connection has it."""
        self.copies.discard(response)
        if self.get(response.request_id) is response:
            del self._responses[response.request_id]

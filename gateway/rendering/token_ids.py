"""The ids of tokens, for requests that ask for them."""

from __future__ import annotations

from collections.abc import Iterable

from millrace.bus.stored_results import UNKNOWN_TOKEN_ID
from millrace.gateway.request.response_reader import ResponseReader
from millrace.gateway.streams.parts import Part, ReasoningPart, TextPart
from millrace.schemas.openai import TokenIds


class ToldTokens:
    """Those of one answer, as its parts come."""

    def __init__(self, response: ResponseReader) -> None:
        self._response = response
        self._token_ids: list[list[int]] = [[] for _ in response.choices]

    def add(self, part: Part) -> None:
        """Right after the part was read."""
        if isinstance(part, TextPart | ReasoningPart):
            self._token_ids[part.choice] += self._ids(part)

    def of_part(self, part: TextPart | ReasoningPart) -> TokenIds:
        """Those that a part tells of, right after it was read."""
        return _known(self._ids(part))

    def of_choice(self, choice: int) -> TokenIds:
        """All that were added."""
        return _known(self._token_ids[choice])

    def _ids(self, part: TextPart | ReasoningPart) -> tuple[int, ...]:
        choice = self._response.choices[part.choice]
        return choice.token_ids(part.first_index, part.num_tokens)


def _known(token_ids: Iterable[int]) -> TokenIds:
    """None for those of a result that was too large to be kept with its ids."""
    ids = tuple(token_ids)
    return None if UNKNOWN_TOKEN_ID in ids else ids

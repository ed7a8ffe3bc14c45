"""End of the first tool call of a completion."""

from __future__ import annotations

from millrace.registry.reasoning import ReasoningParser
from millrace.registry.tool_formats.parser import ToolCallParser
from millrace.schemas.sampling import SamplingOptions


class FirstCall:
    """Finder of the end of the first call in the text of one completion. Reasoning contains no
    calls.
    """

    def __init__(self, sampling: SamplingOptions) -> None:
        assert sampling.one_call is not None
        reasoning = sampling.reasoning
        self._reasoning = None if reasoning is None else ReasoningParser(reasoning)
        self._parser = ToolCallParser(sampling.one_call, str)

    def num_characters(self, text: str) -> int | None:
        """Read the next piece of the text.

        Returns:
            The number of its characters up to the end of the first call; None if the call has not
                ended.
        """
        answer = text
        if self._reasoning is not None:
            _, answer = self._reasoning.push(text)
            if not self._reasoning.ended:
                return None
            self._reasoning = None
        behind = self._parser.text_behind_call(answer)
        return None if behind is None else len(text) - len(behind)

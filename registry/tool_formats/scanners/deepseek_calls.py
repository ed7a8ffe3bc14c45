"""Calls of DeepSeek's models, between tags that are tokens of their own."""

from __future__ import annotations

from millrace.registry.tool_formats.scanners.base import ScanStatus, skip_blanks
from millrace.registry.tool_formats.scanners.json_arguments import JsonScanner

CALLS_BEGIN = "<｜tool▁calls▁begin｜>"
CALLS_END = "<｜tool▁calls▁end｜>"
CALL_BEGIN = "<｜tool▁call▁begin｜>"
CALL_END = "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
FENCE = "```"
JSON_FENCE = "```json"


class DeepseekScanner(JsonScanner):
    """``name<｜tool▁sep｜>{…}`` as V3.1 writes it, or ``function<｜tool▁sep｜>name`` and the
    arguments in a fence, as V3 and R1 do, from the tag that begins a call on."""

    def __init__(self) -> None:
        super().__init__(CALL_END, ScanStatus.ENDED)

    def _opening(self, text: str, at: int) -> int:
        at = skip_blanks(text, at)
        if at < len(text):
            self._step = self._in_call_tag
        return at

    def _in_call_tag(self, text: str, at: int) -> int:
        return self._read_tag(text, at, CALL_BEGIN, self._in_head)

    def _in_head(self, text: str, at: int) -> int:
        """The name, or the type of what is called."""
        at, complete = self._read_name(text, at)
        if complete:
            self.name, self._word = self._word, ""
            self._step = self._in_separator
        return at

    def _in_separator(self, text: str, at: int) -> int:
        return self._read_tag(text, at, SEPARATOR, self._behind_separator)

    def _behind_separator(self, text: str, at: int) -> int:
        at = skip_blanks(text, at)
        if at < len(text):
            self._step = self._before_arguments if text[at] == "{" else self._in_name
        return at

    def _in_name(self, text: str, at: int) -> int:
        at, complete = self._read_name(text, at)
        if complete:
            self.name, self._word = self._word, ""
            self._step = self._behind_name
        return at

    def _behind_name(self, text: str, at: int) -> int:
        at = skip_blanks(text, at)
        if at < len(text):
            self._step = self._in_fence if text[at] == FENCE[0] else self._before_arguments
        return at

    def _in_fence(self, text: str, at: int) -> int:
        return self._read_tag(text, at, JSON_FENCE, self._before_arguments)

    def _before_arguments(self, text: str, at: int) -> int:
        at = skip_blanks(text, at)
        if at == len(text):
            return at
        if text[at] != "{":
            return self._fail(at)
        self.certain = True
        self._step = self._in_arguments
        return at

    def _after_arguments(self, _text: str, at: int) -> int:
        self.status = ScanStatus.ENDED
        return at

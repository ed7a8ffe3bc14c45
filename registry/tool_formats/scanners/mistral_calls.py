"""Calls of Mistral's models, which follow ``[TOOL_CALLS]``."""

from __future__ import annotations

import re

from millrace.registry.tool_formats.scanners.base import ScanStatus, run, skip_blanks
from millrace.registry.tool_formats.scanners.json_calls import CallScanner

CALLS_TAG = "[TOOL_CALLS]"
ID_TAG = "[CALL_ID]"
ARGUMENTS_TAG = "[ARGS]"

_BEHIND_ARGUMENTS = re.compile(r'[A-Za-z0-9_\-,:" \t\n\r]*')


class BracketScanner(CallScanner):
    """A call of a list in JSON, which may have its id behind its arguments, or
    ``name[CALL_ID]id[ARGS]{…}``, whose id and tags may be missing and which is CLOSED at once: the
    next one has its own ``[TOOL_CALLS]``. The ids that models make up are not kept."""

    def __init__(self) -> None:
        super().__init__("")
        self._is_listed = True

    def _opening(self, text: str, at: int) -> int:
        at = skip_blanks(text, at)
        if at == len(text):
            return at
        if text[at] == "[":
            self._step = self._before_first
            return at + 1
        if text[at] == "{":
            return super()._opening(text, at)
        self._is_listed = False
        self._step = self._in_bare_name
        return at

    def _before_first(self, text: str, at: int) -> int:
        return super()._opening(text, at)

    def _in_bare_name(self, text: str, at: int) -> int:
        at, complete = self._read_name(text, at)
        if complete:
            self.name, self._word = self._word, ""
            self._step = self._behind_name
        return at

    def _behind_name(self, text: str, at: int) -> int:
        at = skip_blanks(text, at)
        if at < len(text):
            self._step = self._in_first_tag if text[at] == "[" else self._before_arguments
        return at

    def _in_first_tag(self, text: str, at: int) -> int:
        """``[CALL_ID]`` and ``[ARGS]`` are told apart by their second character."""
        if not self._word:
            self._word = "["
            return at + 1
        if text[at] == ID_TAG[1]:
            self._step = self._in_id_tag
        else:
            self._step = self._in_arguments_tag
        return at

    def _in_id_tag(self, text: str, at: int) -> int:
        return self._read_tag(text, at, ID_TAG, self._in_id)

    def _in_id(self, text: str, at: int) -> int:
        at, complete = self._read_name(text, at)
        if complete:
            self._word = ""
            self._step = self._in_arguments_tag
        return at

    def _in_arguments_tag(self, text: str, at: int) -> int:
        return self._read_tag(text, at, ARGUMENTS_TAG, self._before_arguments)

    def _before_arguments(self, text: str, at: int) -> int:
        at = skip_blanks(text, at)
        if at == len(text):
            return at
        if text[at] != "{":
            return self._fail(at)
        self.certain = True
        self._step = self._in_arguments
        return at

    def _after_arguments(self, text: str, at: int) -> int:
        if not self._is_listed:
            self.status = ScanStatus.CLOSED
            return at
        if not self.certain:
            return super()._after_arguments(text, at)
        at, _ = run(_BEHIND_ARGUMENTS, text, at)
        if at < len(text):
            self.status = ScanStatus.ENDED
            at += text[at] == "}"
        return at

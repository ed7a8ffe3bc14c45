"""Ids of calls, as a model's chat template takes them."""

from __future__ import annotations

import hashlib
import re

from millrace.schemas.tools import ToolFormat

_SHORT = re.compile(r"[A-Za-z0-9]{9}")
# Templates of these models refuse all ids but of nine letters and digits.
WITH_SHORT_IDS = frozenset({ToolFormat.MISTRAL, ToolFormat.MISTRAL_V11})


def new_call_id(tool_format: ToolFormat, seed: str) -> str:
    """An id that is the same for the same ``seed``, and another for any other."""
    digest = hashlib.sha256(seed.encode()).hexdigest()
    return digest[:9] if tool_format in WITH_SHORT_IDS else f"call_{digest[:24]}"


def short_id(call_id: str) -> str:
    """The id if it is of nine letters and digits, else one made of it."""
    if _SHORT.fullmatch(call_id):
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:9]

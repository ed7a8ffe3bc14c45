"""Which format a chat template shows."""

from __future__ import annotations

import re

from millrace.registry.tool_formats.tags import (
    ARGUMENTS_TAG,
    CALLS_TAG,
    JSON_FENCE,
    KEY_TAG,
    OPENING_TAG,
    PARAMETER_TAG,
    SEPARATOR,
)
from millrace.schemas.tools import ToolFormat

# As templates tell a model what to write: [name(parameter=value, …)].
_CALL_IN_PYTHON = re.compile(r"\[[A-Za-z_]\w*\([A-Za-z_]\w*=")


def format_shown(source: str) -> ToolFormat | None:
    """How a template that takes tools has them called; None: in no way that is known here."""
    if CALLS_TAG in source:
        return ToolFormat.MISTRAL_V11 if ARGUMENTS_TAG in source else ToolFormat.MISTRAL
    if SEPARATOR in source:
        return ToolFormat.DEEPSEEK_V3 if JSON_FENCE in source else ToolFormat.DEEPSEEK_V31
    if KEY_TAG in source:
        return ToolFormat.GLM45
    if OPENING_TAG in source:
        return ToolFormat.QWEN3_CODER if PARAMETER_TAG in source else ToolFormat.HERMES
    if _CALL_IN_PYTHON.search(source):
        return ToolFormat.PYTHONIC
    if "python_tag" in source or '"parameters"' in source:
        return ToolFormat.LLAMA3
    return None

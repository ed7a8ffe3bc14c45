"""Token counts of several jobs, together."""

from __future__ import annotations

from collections.abc import Iterable

from schemas.frames import Usage


def total_usage(usages: Iterable[Usage | None]) -> Usage:
    """The sum of each count; None counts nothing."""
    num_prompt = num_cached = num_completion = 0
    for usage in filter(None, usages):
        num_prompt += usage.prompt_tokens
        num_cached += usage.cached_tokens
        num_completion += usage.completion_tokens
    return Usage(
        prompt_tokens=num_prompt, cached_tokens=num_cached, completion_tokens=num_completion
    )

"""Tokens that add no text to a completion, although they are perhaps no special tokens."""

from __future__ import annotations

from collections.abc import Iterable

from millrace.schemas.sampling import SamplingOptions


def silent_tokens(eos_token_ids: Iterable[int], sampling: SamplingOptions) -> frozenset[int]:
    """The tokens that would end the completion, unless the options ask for them in its text."""
    if sampling.include_stop_str_in_output:
        return frozenset()
    if sampling.ignore_eos and not sampling.skip_special_tokens:
        return frozenset(sampling.stop_token_ids)
    return frozenset(eos_token_ids).union(sampling.stop_token_ids)

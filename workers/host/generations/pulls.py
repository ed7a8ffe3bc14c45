"""What an attempt has of other workers' KV caches, and whose it is to be paid."""

from __future__ import annotations

from collections.abc import Mapping

from millrace.engine.types import EngineOutput
from millrace.schemas.records import Attempt
from millrace.schemas.transfer import KvSource


def pulled_from(source: KvSource | None, num_pulled_tokens: int) -> str:
    """The id of the worker that so many tokens came from; empty if none did."""
    return source.worker_id if source is not None and num_pulled_tokens else ""


def num_free_tokens(output: EngineOutput, lives: Mapping[int, Attempt]) -> int:
    """Of the tokens that an engine found in its KV cache when it began, as ``output`` says, those
    that the client does not pay as computed: what an earlier attempt (``lives``, by epoch) computed
    and this one has pulled was not found for free."""
    num_cached = output.num_cached_tokens
    if not lives:
        return num_cached
    earlier = lives[max(lives)].cached_tokens
    return max(num_cached - output.num_pulled_tokens, min(earlier, num_cached))

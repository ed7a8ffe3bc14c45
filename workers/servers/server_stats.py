"""The figures of an inference server, from what it says and from what came of it."""

from __future__ import annotations

from collections.abc import Collection

from millrace.engine.types import EngineStats
from millrace.workers.servers.dialect import ServerLoad
from millrace.workers.servers.live_request import LiveRequest
from millrace.workers.servers.token_shares import TokenShares

# Of a measured time, what the newest counts.
_NEWEST = 0.2


class ServerStats:
    """Counts what passes by, and makes ``EngineStats`` of it. Times in seconds."""

    def __init__(
        self, *, max_num_sequences: int, num_blocks: int, max_tokens_per_request: int
    ) -> None:
        self.load = ServerLoad()
        self._max_num_sequences = max_num_sequences
        self._num_blocks = num_blocks
        self._max_tokens_per_request = max_tokens_per_request
        self._prefill_tokens = self._decode_tokens = 0
        self._prompt_tokens = self._cached_tokens = 0
        self._prefill_tokens_per_s = self._gap_s = 0.0

    def note_first_token(self, live: LiveRequest, now_s: float) -> None:
        """The prompt is computed."""
        num_tokens = live.num_uncached_prompt_tokens
        self._prefill_tokens += num_tokens
        if now_s > live.added_s and num_tokens:
            speed = num_tokens / (now_s - live.added_s)
            self._prefill_tokens_per_s = _averaged(self._prefill_tokens_per_s, speed)

    def note_tokens(self, live: LiveRequest, num_tokens: int, now_s: float) -> None:
        """So many tokens of a request came now."""
        self._decode_tokens += num_tokens
        if live.first_token_s is not None and num_tokens:
            self._gap_s = _averaged(self._gap_s, (now_s - live.last_token_s) / num_tokens)
        live.last_token_s = now_s

    def note_prompt(self, live: LiveRequest) -> None:
        """What of its prompt was cached is known."""
        self._prompt_tokens += live.num_prompt_tokens
        self._cached_tokens += min(live.num_cached_tokens, live.num_prompt_tokens)

    def of(self, live: Collection[LiveRequest], shares: TokenShares) -> EngineStats:
        """As of now."""
        num_running = min(len(live), self._max_num_sequences)
        usage = self.load.kv_usage if live else 0.0
        return EngineStats(
            max_num_sequences=self._max_num_sequences,
            num_running=num_running,
            num_waiting=len(live) - num_running,
            num_blocks=self._num_blocks,
            num_free_blocks=round(self._num_blocks * (1 - min(1.0, usage))),
            num_steps=self.load.num_steps,
            num_preemptions=self.load.num_preemptions,
            prefill_tokens=self._prefill_tokens,
            decode_tokens=self._decode_tokens,
            busy_s=shares.busy_s,
            charged_s=shares.charged_s,
            outstanding_tokens=sum(one.num_outstanding_tokens for one in live),
            outstanding_prompt_tokens=sum(
                one.num_prompt_tokens for one in live if one.first_token_s is None
            ),
            prefill_tokens_per_s=self._prefill_tokens_per_s,
            decode_step_ms=self._gap_s * 1e3,
            max_tokens_per_request=self._max_tokens_per_request,
            prefix_query_tokens=self._prompt_tokens,
            prefix_hit_tokens=self._cached_tokens,
        )


def _averaged(average: float, newest: float) -> float:
    return newest if average == 0.0 else average + _NEWEST * (newest - average)

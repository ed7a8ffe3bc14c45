"""Statistics of a server's work: figures, shares of requests, cached prefixes."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from millrace.engine.types import EngineStats, PrefixChanges
from millrace.schemas.prefix import REPORTED_BYTES, extend_keys, root_key
from millrace.workers.servers.dialect import ServerLoad
from millrace.workers.servers.questions import LiveRequest

# Weight of the newest measurement in a moving average (EWMA).
_NEWEST = 0.2


class TokenShares:
    """Shares of the server's busy time among its requests, in seconds on the caller's clock.

    The time is shared by the tokens computed for each request: uncached prompt tokens and generated
    tokens. A period without tokens is shared evenly.
    """

    def __init__(self) -> None:
        self.busy_s = 0.0
        self._total_s: dict[str, float] = {}
        self._tokens: dict[str, int] = {}
        self._unshared_s = 0.0
        self._since_s = 0.0

    @property
    def charged_s(self) -> float:
        """Part of ``busy_s`` that has been shared."""
        return self.busy_s - self._unshared_s

    def begin(self, request_id: str, now_s: float) -> None:
        """Record that the server has this request from now on."""
        self._advance(now_s)
        self._total_s[request_id] = 0.0

    def note(self, request_id: str, num_tokens: int) -> None:
        """Record that the server computed ``num_tokens`` for a request."""
        self._tokens[request_id] = self._tokens.get(request_id, 0) + num_tokens

    def settle(self, now_s: float) -> dict[str, float]:
        """Return the time of each request so far."""
        self._advance(now_s)
        totals, tokens = self._total_s, self._tokens
        if totals:
            weights = {name: tokens.get(name, 0) for name in totals}
            whole = sum(weights.values())
            for name in totals:
                share = weights[name] / whole if whole else 1 / len(totals)
                totals[name] += self._unshared_s * share
            self._unshared_s = 0.0
            tokens.clear()
        return dict(totals)

    def end(self, request_id: str, now_s: float) -> float:
        """End a request and return its time; 0 if the server never had it."""
        if request_id not in self._total_s:
            return 0.0
        self.settle(now_s)
        return self._total_s.pop(request_id)

    def _advance(self, now_s: float) -> None:
        if self._total_s:
            self.busy_s += now_s - self._since_s
            self._unshared_s += now_s - self._since_s
        self._since_s = now_s


class PrefixEstimate:
    """Estimate of the server's prefix cache: LRU over the blocks of prompts and completions, as
    many as its cache can hold.
    """

    def __init__(self, block_size_tokens: int, capacity_tokens: int) -> None:
        self._size = block_size_tokens
        self._num_blocks = max(1, capacity_tokens // block_size_tokens)
        self._keys: dict[bytes, None] = {}

    def forget(self) -> PrefixChanges:
        """Forget everything: the server's cache was emptied."""
        self._keys.clear()
        return PrefixChanges(whole=True)

    def note(self, token_ids: Sequence[int], salt: str) -> PrefixChanges | None:
        """Record that the server has computed these tokens, and return the changes, if any."""
        keys: list[bytes] = []
        extend_keys(
            keys,
            root_key(salt),
            token_ids,
            num_blocks=len(token_ids) // self._size,
            block_size_tokens=self._size,
        )
        if not keys:
            return None
        added = [key[:REPORTED_BYTES] for key in keys]
        # The beginning of a prompt is useful without its end, but not the other way round.
        for key in reversed(added):
            self._keys.pop(key, None)
            self._keys[key] = None
        removed = list(self._keys)[: max(0, len(self._keys) - self._num_blocks)]
        for key in removed:
            del self._keys[key]
        return PrefixChanges(added=b"".join(reversed(added)), removed=b"".join(removed))


class ServerStats:
    """Counter that builds ``EngineStats`` from observed requests; times in seconds."""

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
        """Record that the prompt is computed."""
        num_tokens = live.num_uncached_prompt_tokens
        self._prefill_tokens += num_tokens
        if now_s > live.added_s and num_tokens:
            speed = num_tokens / (now_s - live.added_s)
            self._prefill_tokens_per_s = _averaged(self._prefill_tokens_per_s, speed)

    def note_tokens(self, live: LiveRequest, num_tokens: int, now_s: float) -> None:
        """Record that ``num_tokens`` tokens of a request arrived now."""
        self._decode_tokens += num_tokens
        if live.first_token_s is not None and num_tokens:
            self._gap_s = _averaged(self._gap_s, (now_s - live.last_token_s) / num_tokens)
        live.last_token_s = now_s

    def note_prompt(self, live: LiveRequest) -> None:
        """Record the prompt's cached tokens, which are known now."""
        self._prompt_tokens += live.num_prompt_tokens
        self._cached_tokens += min(live.num_cached_tokens, live.num_prompt_tokens)

    def of(self, live: Collection[LiveRequest], shares: TokenShares) -> EngineStats:
        """Return the current statistics."""
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

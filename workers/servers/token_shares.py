"""What each request has taken of a server that tells no more than its tokens."""

from __future__ import annotations


class TokenShares:
    """Shares the time during which the server had requests among them, by the tokens that it
    computed for each in that time: those of the prompt that were not cached, and those made. A
    stretch without tokens is shared evenly. Seconds, on the caller's clock."""

    def __init__(self) -> None:
        self.busy_s = 0.0
        self._total_s: dict[str, float] = {}
        self._tokens: dict[str, int] = {}
        self._unshared_s = 0.0
        self._since_s = 0.0

    @property
    def charged_s(self) -> float:
        """What was shared of ``busy_s``."""
        return self.busy_s - self._unshared_s

    def begin(self, request_id: str, now_s: float) -> None:
        """The server has this request from now on."""
        self._advance(now_s)
        self._total_s[request_id] = 0.0

    def note(self, request_id: str, num_tokens: int) -> None:
        """It computed so many tokens for a request."""
        self._tokens[request_id] = self._tokens.get(request_id, 0) + num_tokens

    def settle(self, now_s: float) -> dict[str, float]:
        """What each request has taken so far."""
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
        """What a request took, which the server has no more; 0 for one that it never had."""
        if request_id not in self._total_s:
            return 0.0
        self.settle(now_s)
        return self._total_s.pop(request_id)

    def _advance(self, now_s: float) -> None:
        if self._total_s:
            self.busy_s += now_s - self._since_s
            self._unshared_s += now_s - self._since_s
        self._since_s = now_s

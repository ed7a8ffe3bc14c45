"""How the next token is chosen, and when to stop."""

from __future__ import annotations

import math

import msgspec

from schemas.errors import ParameterError

MAX_STOP_STRINGS = 16
MAX_SEED = 2**63 - 1
MAX_TOP_K = 2**31 - 1


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sampling and stopping of one sequence.

    ``temperature`` 0 is greedy. ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 are off. ``seed`` None
    means that whoever accepts the request draws one; from then on a token's draw depends on
    (seed, token index) alone. ``max_tokens`` None fills the context window. ``logprobs`` is the
    number of alternatives to report per token (0: the chosen token only; None: nothing).

    Raises ParameterError, naming the field, for a value out of range.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ParameterError(
                "max_tokens", f"max_tokens must be at least 1, got {self.max_tokens}"
            )
        _within("temperature", self.temperature, 0.0, 2.0)
        _within("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise ParameterError("top_p", "top_p must be above 0")
        _within("min_p", self.min_p, 0.0, 1.0)
        if not 0 <= self.top_k <= MAX_TOP_K:
            raise ParameterError(
                "top_k", f"top_k must be between 0 (off) and {MAX_TOP_K}, got {self.top_k}"
            )
        if self.seed is not None and not 0 <= self.seed <= MAX_SEED:
            raise ParameterError("seed", f"seed must be between 0 and {MAX_SEED}, got {self.seed}")
        if len(self.stop) > MAX_STOP_STRINGS:
            raise ParameterError("stop", f"at most {MAX_STOP_STRINGS} stop strings are taken")
        if any(not text for text in self.stop):
            raise ParameterError("stop", "a stop string must not be empty")
        if any(token < 0 for token in self.stop_token_ids):
            raise ParameterError("stop_token_ids", "a token id must not be negative")
        if self.logprobs is not None and not 0 <= self.logprobs <= 20:
            raise ParameterError(
                "logprobs", f"logprobs must be between 0 and 20, got {self.logprobs}"
            )


def _within(param: str, value: float, low: float, high: float) -> None:
    if not math.isfinite(value) or not low <= value <= high:
        raise ParameterError(param, f"{param} must be between {low:g} and {high:g}, got {value:g}")

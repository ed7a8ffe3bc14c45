"""A request in a batch that computes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from typing import NamedTuple


class State(Enum):
    """Where a sequence is: added or preempted, admitted, or finished, cancelled or not added."""

    WAITING = auto()
    RUNNING = auto()
    OVER = auto()


class GenerationLimits(NamedTuple):
    """``num_to_make``: how many tokens this run makes at most. A token of ``stop_token_ids`` ends
    it once there are ``min_tokens``."""

    num_to_make: int
    stop_token_ids: frozenset[int] = frozenset()
    min_tokens: int = 0


class SimulatedSequence:
    """A request in the batch.

    ``token_ids`` are those of the prompt and of the completion so far; the first
    ``num_prompt_tokens`` are the prompt, with what an earlier run had made behind it: its tokens
    have the indices 0 to ``num_resumed - 1``.
    The driver may put what it needs into ``tag``, count in ``device_s`` what the sequence takes of
    the steps' time, and note in ``last_token_s`` when its last token was made, by this run or the
    one before it (None: it has none).
    """

    __slots__ = (
        "arrival",
        "device_s",
        "keys",
        "last_token_s",
        "min_tokens",
        "num_blocks",
        "num_cached_blocks",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_resumed",
        "num_total_tokens",
        "priority",
        "rank",
        "request_id",
        "salt",
        "seed",
        "started",
        "state",
        "stop_token_ids",
        "stopped",
        "tag",
        "token_ids",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        *,
        limits: GenerationLimits,
        seed: int,
        num_resumed: int = 0,
        priority: int = 0,
        salt: str = "",
        tag: object = None,
    ) -> None:
        self.request_id = request_id
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.num_resumed = num_resumed
        self.num_total_tokens = self.num_prompt_tokens + limits.num_to_make
        self.seed = seed
        self.stop_token_ids = limits.stop_token_ids
        self.min_tokens = limits.min_tokens
        self.priority = priority
        self.salt = salt
        self.tag = tag
        self.state = State.OVER
        self.arrival = 0
        self.rank = (0, 0)
        self.keys: list[bytes] = []
        self.num_blocks = 0
        self.num_cached_blocks = 0
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.device_s = 0.0
        self.last_token_s: float | None = None
        self.started = False
        self.stopped = False

    @property
    def num_made(self) -> int:
        """Tokens that this run has made."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def outstanding_tokens(self) -> int:
        """What is left to compute if nothing stops early; the last token never is."""
        return max(0, self.num_total_tokens - 1 - self.num_computed_tokens)

"""One choice of a request on its way through the engine."""

from __future__ import annotations

from enum import Enum
from typing import Any

from workers.engine.types import EngineRequest


class SequenceState(Enum):
    """WAITING holds no blocks; RUNNING is in the batch; FINISHED is gone from the engine."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Sequence:
    """Tokens of one choice of a request, and how far the model is with them.

    ``token_ids`` are the prompt, then all output tokens, delivered before or sampled here. The
    keys and values of the first ``num_computed_tokens`` of them are in ``block_table``; the
    others are still to be run through the model, and running the last of them samples the next.
    So a sequence with one token to compute decodes; with more it prefills. Invariants:
    ``0 <= num_computed_tokens < len(token_ids) <= max_total_tokens`` while it lives, and
    ``num_computed_tokens`` fits the block table. ``contents_finite``: logits that saw all of the
    blocks' contents were finite; False while a step is under way or half a prompt is computed.
    ``key`` is that of the sequence's random stream. ``queued_s`` is how long it waited before its
    first step, counted from ``added_s`` on the engine's clock. The planner owns the blocks: it
    allocates them and frees them on preemption and at the end.

    ``sampling_state`` is what the sampler keeps for it between steps, ``matcher`` the grammar's;
    both are None for a sequence without. It is not admitted before it is ``ready``, which another
    thread may say.
    """

    __slots__ = (
        "added_s",
        "arrival",
        "block_table",
        "choice",
        "contents_finite",
        "key",
        "matcher",
        "max_total_tokens",
        "num_computed_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "queued_s",
        "rank",
        "ready",
        "request",
        "sampling_state",
        "started",
        "state",
        "stop_token_ids",
        "token_ids",
    )

    def __init__(
        self,
        request: EngineRequest,
        *,
        arrival: int,
        key: int,
        max_total_tokens: int,
        added_s: float = 0.0,
        choice: int = 0,
    ) -> None:
        self.request = request
        self.choice = choice
        self.arrival = arrival
        self.rank = (-request.priority, arrival)
        self.key = key
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.max_total_tokens = max_total_tokens
        self.token_ids = [*request.prompt_token_ids, *request.output_token_ids]
        self.num_computed_tokens = 0
        self.num_preemptions = 0
        self.block_table: list[int] = []
        self.contents_finite = True
        self.state = SequenceState.WAITING
        self.started = False
        self.added_s = added_s
        self.queued_s = 0.0
        self.sampling_state: Any = None
        self.matcher: Any = None
        self.ready = True
        stops = frozenset(request.sampling.stop_token_ids)
        if not request.sampling.ignore_eos:
            stops |= frozenset(request.eos_token_ids)
        self.stop_token_ids = stops

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def outstanding_tokens(self) -> int:
        """Tokens still to compute if nothing stops it before its bound."""
        return self.max_total_tokens - self.num_computed_tokens

"""Sequence: one choice of a request, and its progress through the engine."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from enum import Enum
from typing import Any

from millrace.engine.types import EngineRequest
from millrace.schemas.frames import TokenLogprob
from millrace.schemas.pooling import Pooling

# (level, virtual arrival time in seconds, arrival number). The smallest tuple has the highest rank.
Rank = tuple[int, float, int]

# Placeholder in ``Sequence.token_ids`` of a token that the device has chosen and that is not read
# yet.
UNREAD_TOKEN = -1


class SequenceState(Enum):
    """State of a sequence.

    FORMING: another choice computes its prompt. WAITING: it holds no blocks. RUNNING: it is in the
    batch. FINISHED: it has left the engine.
    """

    FORMING = "forming"
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


_NEXT_STATES: dict[SequenceState, frozenset[SequenceState]] = {
    SequenceState.FORMING: frozenset(
        (SequenceState.WAITING, SequenceState.RUNNING, SequenceState.FINISHED)
    ),
    SequenceState.WAITING: frozenset(
        (SequenceState.WAITING, SequenceState.RUNNING, SequenceState.FINISHED)
    ),
    SequenceState.RUNNING: frozenset((SequenceState.WAITING, SequenceState.FINISHED)),
    SequenceState.FINISHED: frozenset(),
}


@dataclass(slots=True, eq=False, repr=False)
class Sequence:
    """Sequence: the tokens of one choice of a request, and how far the model has computed them.

    ``token_ids`` are the prompt, then all output tokens, delivered before or sampled here. The keys
    and values of the first ``num_computed_tokens`` are in ``block_table``. The others are still to
    be computed, and computing the last one samples the next. A sequence with one token to compute
    decodes; with more it prefills. The last tokens may be UNREAD_TOKEN: one while the next step is
    planned and launched, and two from then until the step before it has been read.

    Invariants, while it lives: ``0 <= num_computed_tokens < len(token_ids) <= max_total_tokens``,
    and ``num_computed_tokens`` fits the block table.

    Attributes:
        key: Key of the sequence's random stream.
        added_s: Time on the engine's clock when the request was added.
        queued_s: Seconds from ``added_s`` to its first step.
        num_cached_tokens: Tokens that it found in the KV cache before its first step.
        num_pulled_tokens: Tokens of these that were pulled from another worker for it.
        pulled_keys: Keys of the pulled blocks.
        pulled_s: Seconds from ``added_s`` to the arrival of the last pulled block.
        disk_keys: Keys of blocks that were read from disk for it.
        object_keys: Keys of blocks that were read from an object store for it.
        device_s: Its share of the device's busy time, up to the last step that was read.
        contents_finite: False if the sequence failed, so that its blocks' contents are unknown.
        forks: Choices that continue from here once the prompt is computed; empty from then on.
        fork_group: The group that a client leads, to which it belongs. None if tokens are drawn.
        block_table, block_keys, num_cached_blocks, pinned_keys, tail_shared, num_reserved_blocks,
            guaranteed: State of ``BlockTables``, which allocates the blocks and frees them on
            preemption and at the end.
        adapter_weights: Weights of its adapter while it is in the batch.
        proposed: Tokens that the current step computes after the last known one, as candidates for
            the next tokens.
        suggestions: The source of proposed tokens.
        features: Hidden states for a head that drafts; None without one.
        sampling_state: State of the sampler between steps. None for a sequence without.
        matcher: State of the grammar. None for a sequence without.
        pooling_state: Sum of the hidden states of an embedding. None for a sequence without.
        prompt_logprobs: Log-probabilities of the prompt's first tokens until they are output. None
            for a sequence without.
        is_awaited: True while all its tokens are computed or will be by a step in flight, which
            returns the next token. That token is unread at its end or not there yet. There is
            nothing to plan for the sequence, and it is not preempted.
        ready: False while it may not be admitted. Another thread may set it.
    """

    request: EngineRequest
    _: KW_ONLY
    arrival: int
    key: int
    max_total_tokens: int
    added_s: float = 0.0
    choice: int = 0
    rank: Rank = field(init=False)
    num_prompt_tokens: int = field(init=False)
    stop_token_ids: frozenset[int] = field(init=False)
    token_ids: list[int] = field(init=False)
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_pulled_tokens: int = 0
    pulled_keys: frozenset[bytes] = frozenset()
    pulled_s: float = 0.0
    disk_keys: frozenset[bytes] = frozenset()
    object_keys: frozenset[bytes] = frozenset()
    num_preemptions: int = 0
    forks: list[Sequence] = field(default_factory=list)
    fork_group: Any = None
    proposed: list[int] = field(default_factory=list)
    suggestions: Any = None
    features: Any = None
    block_table: list[int] = field(default_factory=list)
    block_keys: list[bytes] = field(default_factory=list)
    num_cached_blocks: int = 0
    pinned_keys: list[bytes] = field(default_factory=list)
    num_reserved_blocks: int = 0
    guaranteed: bool = False
    tail_shared: bool = False
    takes_prefix_hits: bool = field(init=False)
    contents_finite: bool = True
    is_awaited: bool = False
    state: SequenceState = SequenceState.FORMING
    started: bool = False
    ready: bool = True
    queued_s: float = 0.0
    device_s: float = 0.0
    adapter_weights: Any = None
    sampling_state: Any = None
    matcher: Any = None
    pooling_state: Any = None
    prompt_logprobs: list[TokenLogprob | None] | None = None

    def __post_init__(self) -> None:
        request, sampling = self.request, self.request.sampling
        self.rank = (-request.priority, 0.0, self.arrival)
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.token_ids = [*request.prompt_token_ids, *request.output_token_ids]
        # Prefix hits would skip the computation that prompt log-probabilities and mean pooling
        # need.
        self.takes_prefix_hits = (
            sampling.prompt_logprobs is None and request.pooling is not Pooling.MEAN
        )
        if sampling.prompt_logprobs is not None and self.choice == 0:
            self.prompt_logprobs = [None]
        self.stop_token_ids = frozenset(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            self.stop_token_ids |= frozenset(request.eos_token_ids)

    def enter(self, state: SequenceState) -> None:
        """Change the state.

        A new sequence that was not admitted stays waiting; a preempted one waits again.
        """
        assert state in _NEXT_STATES[self.state], f"{self.state.name} to {state.name}"
        self.state = state

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
    def has_unread_token(self) -> bool:
        return self.token_ids[-1] == UNREAD_TOKEN

    @property
    def is_held(self) -> bool:
        """True if it waits for the others of its fork group."""
        return self.fork_group is not None and self.token_ids[-1] == UNREAD_TOKEN

    @property
    def num_read_output_tokens(self) -> int:
        """Number of output tokens without the unread ones at the end."""
        num_tokens = len(self.token_ids)
        while self.token_ids[num_tokens - 1] == UNREAD_TOKEN:
            num_tokens -= 1
        return num_tokens - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def outstanding_tokens(self) -> int:
        """Tokens still to compute up to ``max_total_tokens``, if nothing stops the sequence
        earlier."""
        return self.max_total_tokens - self.num_computed_tokens

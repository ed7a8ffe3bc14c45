"""One choice of a request on its way through the engine."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from enum import Enum
from typing import Any

from millrace.engine.types import EngineRequest
from millrace.schemas.frames import TokenLogprob
from millrace.schemas.pooling import Pooling

# (level, virtual time of arrival in seconds, number of arrival); the smallest is the highest rank.
Rank = tuple[int, float, int]

# In ``Sequence.token_ids``: this one was chosen on the device, and it is not read yet.
UNREAD_TOKEN = -1


class SequenceState(Enum):
    """FORMING is a choice whose prompt another choice computes; WAITING holds no blocks; RUNNING
    is in the batch; FINISHED is gone from the engine."""

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
    """Tokens of one choice of a request, and how far the model is with them.

    ``token_ids`` are the prompt, then all output tokens, delivered before or sampled here. The
    keys and values of the first ``num_computed_tokens`` of them are in ``block_table``; the
    others are still to be run through the model, and running the last of them samples the next.
    So a sequence with one token to compute decodes; with more it prefills. The last tokens may be
    UNREAD_TOKEN: one while the next step is planned and launched, two until the step before it has
    been read then. Invariants:
    ``0 <= num_computed_tokens < len(token_ids) <= max_total_tokens`` while it lives, and
    ``num_computed_tokens`` fits the block table. ``contents_finite`` is False for one that
    failed, so that nobody knows what is in its blocks. ``key`` is that of the sequence's random
    stream. ``queued_s`` is how long it waited before its first step, counted from ``added_s`` on
    the engine's clock; ``num_cached_tokens`` is how many tokens it found in the KV cache then,
    ``num_pulled_tokens`` how many of those had been pulled from another worker for it, in blocks
    of ``pulled_keys``, the last of which came ``pulled_s`` after ``added_s``; ``disk_keys`` and
    ``object_keys`` are of blocks that came from disk or an object store for it. ``device_s`` is its
    share of the time that the device was busy, up to the last step that has been read.

    ``forks`` are the choices that go on from where this one has computed the prompt; it is empty
    from then on. ``block_table``, ``block_keys``, ``num_cached_blocks``, ``pinned_keys``,
    ``tail_shared``, ``num_reserved_blocks`` and ``guaranteed`` are those of ``BlockTables``, which
    allocates the blocks and frees them on preemption and at the end.

    ``fork_group`` is the group that a client leads and it belongs to, None for a sequence that is
    drawn.
    ``adapter_weights`` are those of its adapter while it is in the batch.
    ``proposed`` are tokens that the step at hand computes behind the last known one, in case they
    turn out to be the next; ``suggestions`` is what makes them.
    ``features`` are hidden states for a head that drafts, None unless there is one.
    ``sampling_state`` is what the sampler keeps for it between steps, ``matcher`` the grammar's,
    ``pooling_state`` the sum of the hidden states behind an embedding, ``prompt_logprobs`` those
    of the prompt's first tokens until they are handed over; each is None for a sequence without.
    While ``is_awaited`` all its tokens are computed or will be by a step that is under way, which
    says the next one, that is unread at its end or not there yet: there is nothing to plan for it,
    and it is not preempted.
    It is not admitted before it is ``ready``, which another thread may say.
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
        # The log-probabilities and the mean of a prompt are only there where it is computed.
        self.takes_prefix_hits = (
            sampling.prompt_logprobs is None and request.pooling is not Pooling.MEAN
        )
        if sampling.prompt_logprobs is not None and self.choice == 0:
            self.prompt_logprobs = [None]
        self.stop_token_ids = frozenset(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            self.stop_token_ids |= frozenset(request.eos_token_ids)

    def enter(self, state: SequenceState) -> None:
        """The one transition of states. A newcomer that was looked at and not admitted waits on;
        a preempted one waits again."""
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
        """Whether it waits for the others of its fork group."""
        return self.fork_group is not None and self.token_ids[-1] == UNREAD_TOKEN

    @property
    def num_read_output_tokens(self) -> int:
        """Output tokens that are known; the others at the end are unread."""
        num_tokens = len(self.token_ids)
        while self.token_ids[num_tokens - 1] == UNREAD_TOKEN:
            num_tokens -= 1
        return num_tokens - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def outstanding_tokens(self) -> int:
        """Tokens still to compute if nothing stops it before its bound."""
        return self.max_total_tokens - self.num_computed_tokens

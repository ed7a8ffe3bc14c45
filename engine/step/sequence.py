"""One choice of a request on its way through the engine."""

from __future__ import annotations

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

    __slots__ = (
        "adapter_weights",
        "added_s",
        "arrival",
        "block_keys",
        "block_table",
        "choice",
        "contents_finite",
        "device_s",
        "disk_keys",
        "features",
        "fork_group",
        "forks",
        "guaranteed",
        "is_awaited",
        "key",
        "matcher",
        "max_total_tokens",
        "num_cached_blocks",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_pulled_tokens",
        "num_reserved_blocks",
        "object_keys",
        "pinned_keys",
        "pooling_state",
        "prompt_logprobs",
        "proposed",
        "pulled_keys",
        "pulled_s",
        "queued_s",
        "rank",
        "ready",
        "request",
        "sampling_state",
        "started",
        "state",
        "stop_token_ids",
        "suggestions",
        "tail_shared",
        "takes_prefix_hits",
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
        self.rank: Rank = (-request.priority, 0.0, arrival)
        self.key = key
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.max_total_tokens = max_total_tokens
        self.token_ids = [*request.prompt_token_ids, *request.output_token_ids]
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0
        self.num_pulled_tokens = 0
        self.pulled_keys: frozenset[bytes] = frozenset()
        self.pulled_s = 0.0
        self.disk_keys: frozenset[bytes] = frozenset()
        self.object_keys: frozenset[bytes] = frozenset()
        self.num_preemptions = 0
        self.forks: list[Sequence] = []
        self.proposed: list[int] = []
        self.suggestions: Any = None
        self.features: Any = None
        self.block_table: list[int] = []
        self.block_keys: list[bytes] = []
        self.num_cached_blocks = 0
        self.pinned_keys: list[bytes] = []
        self.num_reserved_blocks = 0
        self.guaranteed = False
        self.tail_shared = False
        # The log-probabilities and the mean of a prompt are only there where it is computed.
        self.takes_prefix_hits = (
            request.sampling.prompt_logprobs is None and request.pooling is not Pooling.MEAN
        )
        self.contents_finite = True
        self.is_awaited = False
        self.state = SequenceState.FORMING
        self.started = False
        self.added_s = added_s
        self.queued_s = 0.0
        self.device_s = 0.0
        self.adapter_weights: Any = None
        self.fork_group: Any = None
        self.sampling_state: Any = None
        self.matcher: Any = None
        self.pooling_state: Any = None
        self.prompt_logprobs: list[TokenLogprob | None] | None = None
        if request.sampling.prompt_logprobs is not None and choice == 0:
            self.prompt_logprobs = [None]
        self.ready = True
        stops = frozenset(request.sampling.stop_token_ids)
        if not request.sampling.ignore_eos:
            stops |= frozenset(request.eos_token_ids)
        self.stop_token_ids = stops

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

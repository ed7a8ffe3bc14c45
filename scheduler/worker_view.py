"""One live worker as a scheduler sees it."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.need import Need
from schemas.control import WorkerStatus

# A worker reports less than we think it holds while an answer or the notice of an end is on its
# way; longer than this, a notice was lost.
_DOUBT_AFTER_S = 2.0


@dataclass(slots=True)
class _Run:
    num_tokens: int
    num_blocks: int
    confirmed: bool = False
    seen: bool = False


class WorkerView:
    """The last heartbeat, corrected by what was dispatched and what ended since.

    ``runs`` are the requests that this scheduler sent here; what else the worker reports belongs
    to other schedulers (``num_others``). ``refusing``: it turned a request down since its last
    heartbeat.
    """

    def __init__(self, status: WorkerStatus, now_s: float) -> None:
        self.status = status
        self.seen_s = now_s
        self.runs: dict[str, _Run] = {}
        self.num_others = status.num_running + status.num_waiting
        self.refusing = False
        self._freed_blocks = 0
        self._freed_tokens = 0
        self._short_since_s: float | None = None

    @property
    def worker_id(self) -> str:
        return self.status.worker_id

    # --- changes ---

    def observe(self, status: WorkerStatus, now_s: float) -> None:
        """Take in a later heartbeat of the same life."""
        self.status = status
        self.seen_s = now_s
        self.refusing = False
        self._freed_blocks = self._freed_tokens = 0
        for run in self.runs.values():
            run.seen = run.confirmed
        reported = status.num_running + status.num_waiting
        self.num_others = max(0, reported - len(self.runs))
        is_short = reported < sum(run.seen for run in self.runs.values())
        if not is_short:
            self._short_since_s = None
        elif self._short_since_s is None:
            self._short_since_s = now_s

    def reserve(self, request_id: str, need: Need) -> None:
        assert request_id not in self.runs, "a worker runs a request once"
        blocks = need.num_blocks(self.status.block_size_tokens)
        self.runs[request_id] = _Run(need.total_tokens, blocks)

    def confirm(self, request_id: str) -> None:
        run = self.runs.get(request_id)
        if run is not None:
            run.confirmed = True

    def release(self, request_id: str) -> bool:
        """Forget a run; whether there was one. Its room is free before the next heartbeat."""
        run = self.runs.pop(request_id, None)
        if run is None:
            return False
        if run.seen:
            self._freed_blocks += run.num_blocks
            reported = max(self.status.num_running + self.status.num_waiting, 1)
            self._freed_tokens += self.status.outstanding_tokens // reported
        if run.confirmed:
            self.refusing = False
        return True

    # --- predictions ---

    @property
    def num_held(self) -> int:
        return self.num_others + len(self.runs)

    @property
    def has_free_slot(self) -> bool:
        """A request sent now would run at once, not wait in the worker."""
        return self.num_held < self.status.max_num_sequences

    @property
    def num_free_blocks(self) -> int:
        """Blocks that will still be free when everything that was sent has its prompt's blocks."""
        used = self.status.num_blocks - self.status.num_free_blocks - self._freed_blocks
        used += sum(run.num_blocks for run in self.runs.values() if not run.seen)
        promised = sum(run.num_blocks for run in self.runs.values())
        return self.status.num_blocks - max(used, promised, 0)

    @property
    def outstanding_tokens(self) -> int:
        """Tokens still to be computed for what it has."""
        unseen = sum(run.num_tokens for run in self.runs.values() if not run.seen)
        return max(0, self.status.outstanding_tokens - self._freed_tokens) + unseen

    @property
    def room(self) -> int:
        """How many more requests it would take now."""
        if self.refusing or self.status.draining:
            return 0
        if self.status.num_blocks and self.num_held and self.num_free_blocks <= 0:
            return 0
        limit = self.status.max_num_sequences + self.status.max_num_waiting
        return max(0, limit - self.num_held)

    def fits(self, need: Need) -> bool:
        """There is a place and blocks for this request now; an idle worker has all its blocks."""
        if self.room == 0 or not self.could_hold(need):
            return False
        if not self.status.num_blocks or self.num_held == 0:
            return True
        return need.num_blocks(self.status.block_size_tokens) <= self.num_free_blocks

    def could_hold(self, need: Need) -> bool:
        """The request would fit if the worker were empty."""
        limit = self.status.max_tokens_per_request
        return limit == 0 or need.total_tokens <= limit

    @property
    def is_doubtful(self) -> bool:
        return (
            self._short_since_s is not None and self.seen_s - self._short_since_s >= _DOUBT_AFTER_S
        )

    def trust(self) -> None:
        """Its runs are being looked up one by one."""
        self._short_since_s = None

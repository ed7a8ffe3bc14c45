"""Run of a request at a simulated worker, with its frames and records."""

from __future__ import annotations

from asyncio import TimerHandle
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from millrace.bus.jobs.ends import record_of
from millrace.schemas.control import Dispatch, Served
from millrace.schemas.frames import Cancelled, Done, Expired, FinishReason, Frame, Started, Usage
from millrace.schemas.jobs import Job, Tier
from millrace.schemas.records import RequestRecord, Status
from millrace.simulation.outcomes import RequestOutcome
from millrace.workers.simulated.blocks import GenerationLimits, SimulatedSequence

# As in the real worker.
PRIORITIES = {tier: rank for rank, tier in enumerate(reversed(Tier), start=-1)}
_NS_PER_MS = 1e6
_NS_PER_US = 1e3


@dataclass(slots=True, eq=False)
class SimulatedRun:
    """Run of a request.

    ``sequence`` is None if the client already had all tokens. Times are UTC in ns, 0 for events
    that did not happen.
    """

    dispatch: Dispatch
    outcome: RequestOutcome
    sequence: SimulatedSequence | None = None
    epoch: int = 0
    lease: str = ""
    started_ns: int = 0
    first_token_ns: int = 0
    expiry: TimerHandle | None = None

    @classmethod
    def of(cls, dispatch: Dispatch, outcome: RequestOutcome, *, apart: bool) -> SimulatedRun:
        """Make the run of a dispatch. ``apart``: tenants do not share cached prompts."""
        run = cls(dispatch, outcome, epoch=dispatch.epoch, lease=dispatch.lease)
        job = dispatch.job
        num_resumed = len(dispatch.resume_token_ids)
        num_to_make = outcome.request.output_tokens - num_resumed
        if num_to_make > 0:
            run.sequence = SimulatedSequence(
                job.request_id,
                (*(job.prompt_token_ids or ()), *dispatch.resume_token_ids),
                limits=GenerationLimits(num_to_make=num_to_make),
                seed=outcome.first_answer_token,
                num_resumed=num_resumed,
                priority=PRIORITIES[job.tier],
                salt=job.tenant if apart else "",
                tag=run,
            )
            run.sequence.last_token_s = outcome.last_token_s
        return run

    @property
    def request_id(self) -> str:
        return self.outcome.request_id

    @property
    def num_tokens(self) -> int:
        """Tokens of the completion, including earlier runs."""
        made = 0 if self.sequence is None else self.sequence.num_made
        return len(self.dispatch.resume_token_ids) + made

    @property
    def num_cached_tokens(self) -> int:
        return 0 if self.sequence is None else self.sequence.num_cached_tokens

    @property
    def num_paid_cached_tokens(self) -> int:
        return 0 if self.dispatch.job.shares_prompt else self.num_cached_tokens

    def started_frame(self, worker_id: str) -> Frame:
        return Started(
            worker_id=worker_id,
            num_prompt_tokens=len(self.dispatch.job.prompt_token_ids or ()),
            num_cached_tokens=self.num_cached_tokens,
            epoch=self.epoch,
        )

    def closing_frames(self, status: Status) -> tuple[Frame, ...]:
        count, epoch = self.num_tokens, self.epoch
        usage = Usage(
            prompt_tokens=self.dispatch.job.num_paid_prompt_tokens,
            cached_tokens=self.num_paid_cached_tokens,
            completion_tokens=count,
            epoch=epoch,
        )
        match status:
            case Status.DONE:
                done = Done(finish_reason=FinishReason.LENGTH, num_tokens=count, epoch=epoch)
                return usage, done
            case Status.EXPIRED:
                return usage, Expired(num_tokens=count, epoch=epoch)
            case _:
                return usage, Cancelled(num_tokens=count, epoch=epoch)

    def served(self) -> Served:
        """Return the service of the run."""
        job, sequence = self.dispatch.job, self.sequence
        began = sequence is not None and sequence.started
        return Served(
            request_id=job.request_id,
            tenant=job.tenant,
            tier=job.tier,
            epoch=self.epoch,
            started_ns=self.started_ns,
            prompt_tokens=sequence.num_prompt_tokens if sequence is not None and began else 0,
            cached_tokens=self.num_cached_tokens,
            completion_tokens=sequence.num_made if sequence is not None else 0,
        )

    def record(self, status: Status, worker_id: str, done_ns: int) -> RequestRecord:
        job, sequence = self.dispatch.job, self.sequence
        num_later = sequence.num_made - 1 if sequence is not None else 0
        return msgspec.structs.replace(
            record_of(job, status, "", self.epoch, done_ns),
            worker_id=worker_id,
            prompt_tokens=job.num_paid_prompt_tokens,
            cached_tokens=self.num_paid_cached_tokens,
            completion_tokens=self.num_tokens,
            queue_ms=_since_ms(job.received_ns, self.started_ns),
            ttft_ms=_since_ms(job.received_ns, self.first_token_ns),
            tpot_us=(done_ns - self.first_token_ns) / _NS_PER_US / num_later
            if num_later > 0
            else 0.0,
            finish_reason=FinishReason.LENGTH.value if status is Status.DONE else "",
            started_ns=self.started_ns,
            first_token_ns=self.first_token_ns,
            num_preemptions=sequence.num_preemptions if sequence is not None else 0,
        )


def _since_ms(from_ns: int, to_ns: int) -> float:
    return max(0, to_ns - from_ns) / _NS_PER_MS if to_ns else 0.0


def prefix_of(job: Job, token_ids: Sequence[int], *, apart: bool) -> SimulatedSequence:
    """Return a job's present prefix as a sequence that makes nothing."""
    return SimulatedSequence(
        job.request_id,
        (*(job.prompt_token_ids or ()), *token_ids),
        limits=GenerationLimits(num_to_make=1),
        seed=0,
        salt=job.tenant if apart else "",
    )

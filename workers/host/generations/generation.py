"""Request on the bus side of a worker, from its dispatch to its end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from millrace.engine.types import EngineOutput
from millrace.registry.reasoning import num_reasoning_tokens
from millrace.schemas.control import Dispatch, Served
from millrace.schemas.frames import FinishReason, Usage
from millrace.schemas.jobs import Tier
from millrace.schemas.models.adapters import AdapterRef
from millrace.schemas.notices import Notices, bounded
from millrace.schemas.records import Status
from millrace.schemas.transfer import KvSource
from millrace.workers.host.generations.accounting import Accounting, DeviceUse
from millrace.workers.host.generations.generated_output import GeneratedOutput
from millrace.workers.host.generations.state import (
    LENGTH_REACHED,
    STOPPED,
    FrameDelivery,
    GenerationOutcome,
    GenerationPhase,
    GenerationTiming,
    LeaseState,
    Listener,
    failed,
    is_failure,
    is_refusal,
)

# Looking up an attribute of an enum takes longer, and each output would do so.
_QUEUED, _PREFILLING, _, _ENDED = GenerationPhase
# Batch work has a priority below 0, so all other work preempts it.
PRIORITIES = {tier: priority for priority, tier in enumerate(reversed(Tier), start=-1)}


class Trace(Protocol):
    """Trace of a generation, implemented by ``tracing.RunTrace``."""

    def add_event(self, name: str) -> None: ...

    def end_prefill(self, generation: Generation) -> None: ...

    def finish(self, generation: Generation) -> None: ...

    def record_published(self, generation: Generation) -> None: ...


class Generation:
    """Request on this worker, from its dispatch to its end.

    ``attempts`` are the earlier attempts, by epoch. ``first_epoch`` is the epoch of this attempt,
    which may continue under later epochs. With ``known_outcome`` an earlier attempt produced all
    tokens, and only the prompt's log-probabilities are missing. If the job is dispatched here again
    after ``outcome`` is set, only epoch, lease and delivery change.
    """

    __slots__ = (
        "_dispatch",
        "accounting",
        "attempts",
        "delivery",
        "engine_id",
        "epoch",
        "job",
        "known_outcome",
        "lease",
        "outcome",
        "output",
        "phase",
        "timing",
        "trace",
    )

    def __init__(
        self,
        dispatch: Dispatch,
        output: GeneratedOutput,
        accepted_ns: int,
        now_s: float,
        device_use: DeviceUse,
    ) -> None:
        job = dispatch.job
        assert job.prompt_token_ids is not None
        self._dispatch = dispatch
        self.job = job
        self.epoch = dispatch.epoch
        self.attempts = {attempt.epoch: attempt for attempt in dispatch.attempts}
        # Another attempt of the same request may still have outputs on their way.
        self.engine_id = f"{job.request_id}:{dispatch.epoch}"
        self.output = output
        self.accounting = Accounting(device_use)
        self.phase = GenerationPhase.QUEUED
        self.timing = GenerationTiming(dispatch.sent_ns, accepted_ns)
        self.lease = LeaseState.of(dispatch, now_s)
        self.delivery = FrameDelivery(output.num_resumed)
        if job.reply:
            self.delivery.add(self.listener(job.reply))
        self.known_outcome: GenerationOutcome | None = None
        self.outcome: GenerationOutcome | None = None
        self.trace: Trace | None = None

    def _enter(self, phase: GenerationPhase, at_ns: int) -> None:
        """Enter a later phase and record the time in ``timing``. All transitions go through
        here.
        """
        assert phase > self.phase, f"{self.phase.name} to {phase.name}"
        self.phase = phase
        match phase:
            case GenerationPhase.PREFILLING:
                self.timing.started_ns = at_ns
            case GenerationPhase.DECODING:
                self.timing.first_token_ns = at_ns
            case GenerationPhase.ENDED:
                self.timing.done_ns = at_ns

    def end(self, outcome: GenerationOutcome, now_ns: int) -> None:
        """End the generation with its outcome; nothing more is computed."""
        self.outcome = outcome
        self._enter(GenerationPhase.ENDED, now_ns)
        output = self.output
        if output.answer is not None:
            output.answer.read(output.pieces)
            output.answer.finish(outcome.finish_reason, self.stop_reason)

    # --- the request ---

    @property
    def request_id(self) -> str:
        return self.job.request_id

    @property
    def adapter(self) -> AdapterRef | None:
        return self._dispatch.adapter

    @property
    def kv_source(self) -> KvSource | None:
        """Worker from which the KV blocks of the context can be pulled."""
        return self._dispatch.kv_source

    @property
    def first_epoch(self) -> int:
        return self._dispatch.epoch

    @property
    def prompt_token_ids(self) -> tuple[int, ...]:
        assert self.job.prompt_token_ids is not None
        return self.job.prompt_token_ids

    @property
    def priority(self) -> int:
        return PRIORITIES[self.job.tier]

    # --- progress ---

    @property
    def ended(self) -> bool:
        return self.phase is _ENDED

    @property
    def ran(self) -> bool:
        """True if an engine computed anything for it, here or in an earlier attempt. A request that
        never ran costs nothing.
        """
        return bool(self.timing.started_ns or self.output.num_resumed)

    @property
    def num_tokens(self) -> int:
        """Number of tokens of prompt and completion so far."""
        return len(self.prompt_token_ids) + len(self.output.token_ids)

    @property
    def num_certain_tokens(self) -> int:
        """Number of tokens whose parts are final. The end of a completion may add to the parts of
        its last token.
        """
        output = self.output
        num_tokens = len(output.token_ids)
        if output.answer is None or self.ended:
            return num_tokens
        output.answer.read(output.pieces)
        return num_tokens if output.answer.is_certain else max(num_tokens - 1, 0)

    @property
    def finish_reason(self) -> FinishReason | None:
        """Finish reason for the client, if the generation ended well."""
        reason, answer = (
            None if self.outcome is None else self.outcome.finish_reason,
            self.output.answer,
        )
        return reason if reason is None or answer is None else answer.finish_reason(reason)

    @property
    def stop_reason(self) -> str | int | None:
        """Stop string or id of the stop token that ended the completion, if one did."""
        if self.outcome is None or self.outcome.finish_reason is not FinishReason.STOP:
            return None
        output = self.output
        if output.beams is not None:
            return output.beams.ends[0].stop_reason
        if output.stream.stop_string is not None or not output.token_ids:
            return output.stream.stop_string
        last = output.token_ids[-1]
        return last if last in self.job.sampling.stop_token_ids else None

    @property
    def notices(self) -> Notices:
        """Notices for the end of the answer: features that it leaves out or rules that it
        breaks.
        """
        notices, answer = self.job.notices, self.output.answer
        return notices if answer is None else bounded((*notices, *answer.notices))

    def resumed_outcome(self, eos_token_ids: Sequence[int]) -> GenerationOutcome | None:
        """Return the outcome that the tokens of an earlier attempt had already reached, if any."""
        sampling, output = self.job.sampling, self.output
        if not output.token_ids:
            return None
        last = output.token_ids[-1]
        ends = last in sampling.stop_token_ids or (
            last in eos_token_ids and not sampling.ignore_eos
        )
        if output.stream.stopped:
            return STOPPED
        if not ends and len(output.token_ids) < (sampling.max_tokens or 0):
            return None
        output.flush()
        return STOPPED if ends else LENGTH_REACHED

    def apply(self, output: EngineOutput, now_ns: int) -> GenerationOutcome | None:
        """Add the output of a step. Return the outcome if it is the last output."""
        made, accounting = self.output, self.accounting
        if self.phase is _QUEUED and (output.started or output.error is None):
            admitted_ns = self.timing.accepted_ns + round(output.queued_s * 1e9)
            self._enter(GenerationPhase.PREFILLING, min(now_ns, admitted_ns))
            self.timing.note_pull(output.num_pulled_tokens, output.pulled_s)
            accounting.begin(output, self.attempts, len(self.prompt_token_ids))
        elif output.num_cached_tokens > accounting.num_found_tokens and not output.started:
            # The start of another engine reports again how many tokens it found in its cache.
            accounting.find_more(output, len(self.prompt_token_ids))
        accounting.add(output)
        made.add_scores(output)
        if output.token_ids and self.known_outcome is None:
            if self.phase is _PREFILLING:
                self._enter(GenerationPhase.DECODING, now_ns)
                if self.trace is not None:
                    self.trace.end_prefill(self)
            self.timing.last_token_ns = now_ns
            if made.beams is not None:
                return made.beams.add(output)
            if made.add_tokens(output):
                return STOPPED
        if output.error is not None:
            return failed(*output.error)
        if output.finish_reason is None:
            return None
        if self.known_outcome is not None:
            return self.known_outcome
        made.flush()
        return GenerationOutcome(status=Status.DONE, finish_reason=output.finish_reason)

    def continues(self, token_ids: Sequence[int]) -> bool:
        """Return whether a client that has ``token_ids`` can continue with this generation."""
        return tuple(self.output.token_ids[: len(token_ids)]) == tuple(token_ids)

    def adopt(self, dispatch: Dispatch, worker_id: str, now_s: float) -> None:
        """Continue under a new lease and epoch, from the first token that the client does not have.

        The dispatch may list this very run on ``worker_id`` as an earlier attempt; that entry is
        left out.
        """
        self.attempts |= {
            attempt.epoch: attempt
            for attempt in dispatch.attempts
            if attempt.worker_id != worker_id or attempt.epoch < self.first_epoch
        }
        self.epoch = dispatch.epoch
        self.lease = LeaseState.of(dispatch, now_s)
        self.delivery.rewind(len(dispatch.resume_token_ids))

    def listener(self, reply: str) -> Listener:
        """Return a listener at ``reply``, with frames in the form that the job asks for."""
        return Listener(reply, self.job.batch_frames, self.job.frames_as_json)

    # --- usage ---

    def usage(self) -> Usage | None:
        """Return the usage.

        A request that was refused for its content has a usage of 0 tokens. Any other request that
        never ran has no usage (None) and does not count as a request. A prompt that another choice
        pays for counts no tokens.
        """
        if not self.ran:
            return Usage() if is_refusal(self.outcome) else None
        reasoning = self.job.sampling.reasoning
        if self.output.beams is not None:
            num_thoughts = self.output.beams.num_reasoning_tokens
        else:
            num_thoughts = num_reasoning_tokens(reasoning, self.output.pieces) if reasoning else 0
        return Usage(
            prompt_tokens=self.num_paid_prompt_tokens,
            cached_tokens=0 if self.job.shares_prompt else self.accounting.num_cached_tokens,
            completion_tokens=self.output.num_completion_tokens,
            reasoning_tokens=num_thoughts,
            proposed_tokens=self.accounting.num_proposed_tokens,
            accepted_tokens=self.accounting.num_accepted_tokens,
        )

    @property
    def num_paid_prompt_tokens(self) -> int:
        """Number of prompt tokens that count and cost."""
        return 0 if self.job.shares_prompt else len(self.prompt_token_ids)

    def pop_served(self) -> Served | None:
        """Return the usage of this attempt, once.

        None if it never started, used no device time and did not fail. A request that is superseded
        during its first step has device time without a start.
        """
        device_us = self.accounting.device_use.total_us
        is_used = bool(self.timing.started_ns or device_us or is_failure(self.outcome))
        if self.accounting.is_charged or not is_used:
            return None
        self.accounting.is_charged = True
        num_made = self.output.num_completion_tokens - self.output.num_resumed
        num_prompt = len(self.prompt_token_ids)
        if self.known_outcome is None:
            num_prompt += self.output.num_resumed
        return Served(
            request_id=self.request_id,
            tenant=self.job.tenant,
            tier=self.job.tier,
            answer=None
            if self.outcome is None
            else self.timing.answer(self.outcome.status, self.job.received_ns, num_made),
            epoch=self.epoch,
            started_ns=self.timing.started_ns,
            device_us=device_us,
            energy_j=self.accounting.device_use.settle_energy(),
            prompt_tokens=num_prompt if self.timing.started_ns else 0,
            cached_tokens=self.accounting.num_found_tokens,
            completion_tokens=num_made,
            pulled_tokens=self.accounting.num_pulled_tokens,
            kv_source=self.accounting.pulled_from(self.kv_source),
        )

"""One request on the bus side of a worker, from its dispatch to its end."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Protocol

import msgspec

from millrace.engine.types import EngineOutput
from millrace.registry.reasoning import num_reasoning_tokens
from millrace.registry.tokenizers.output_text import TextStream
from millrace.schemas.control import Dispatch, Served
from millrace.schemas.frames import (
    Delta,
    Done,
    Embedding,
    FinishReason,
    Frame,
    Started,
    TerminalFrame,
    TokenLogprob,
    Usage,
)
from millrace.schemas.jobs import Tier
from millrace.schemas.notices import Notices, bounded
from millrace.schemas.records import Status
from millrace.workers.host.generations import outcomes
from millrace.workers.host.generations.beam_answers import BeamAnswers
from millrace.workers.host.generations.chat_answer import ChatAnswer
from millrace.workers.host.generations.device_use import DeviceUse
from millrace.workers.host.generations.frames import delta, prompt_logprob_frames, unanswered
from millrace.workers.host.generations.outcomes import GenerationOutcome
from millrace.workers.host.generations.pulls import num_free_tokens, pulled_from
from millrace.workers.host.generations.state import Delivery, LeaseState, Listener, Phase, Timing

# An attribute of an enum takes longer to look up, and each output does so.
_QUEUED, _PREFILLING, _, _ENDED = Phase
MAX_TOKENS_PER_DELTA = 1024
# Batch work has one below 0, so it is preempted for all other work.
PRIORITIES = {tier: priority for priority, tier in enumerate(reversed(Tier), start=-1)}


class Trace(Protocol):
    """The trace of a generation; implemented by ``tracing.RunTrace``."""

    def add_event(self, name: str) -> None: ...

    def end_prefill(self, generation: Generation) -> None: ...

    def finish(self, generation: Generation) -> None: ...

    def record_published(self, generation: Generation) -> None: ...


class Generation:
    """A request on this worker, from its dispatch to its end.

    ``token_ids`` and ``pieces`` run in parallel: ``pieces[i]`` is the text that token i added. The
    client has the first ``num_resumed`` tokens from an earlier attempt. ``logprobs`` has one entry
    for each token from ``num_resumed`` on, if the job asked for any; ``prompt_logprobs`` one for
    each of the prompt. ``embedding`` is little-endian float32, empty until it is computed.
    ``beams`` are a beam search's answers, beside which it has no tokens; None without. ``answer``
    tells the parts of a chat's answer apart; None: its text is told as the model wrote it. With
    ``known_outcome`` an earlier attempt made all tokens, and only the prompt's log-probabilities
    are missing. ``resampled``: it was continued by an engine that draws other tokens then than its
    seed would have given. ``num_pulled_tokens`` of those that it began with, resumed ones included,
    came from another worker's KV cache, that of ``kv_source``. ``lives`` are the attempts before
    this one, by epoch; it is this attempt from ``first_epoch`` on, under whatever later ones. When
    the job is dispatched here again after ``outcome`` is set, only epoch, lease and delivery
    change.
    """

    __slots__ = (
        "_is_charged",
        "_num_found_tokens",
        "_stream",
        "adapter",
        "answer",
        "beams",
        "delivery",
        "device_use",
        "embedding",
        "engine_id",
        "epoch",
        "first_epoch",
        "job",
        "known_outcome",
        "kv_source",
        "lease",
        "lives",
        "logprobs",
        "num_accepted_tokens",
        "num_cached_tokens",
        "num_preemptions",
        "num_proposed_tokens",
        "num_pulled_tokens",
        "num_resumed",
        "outcome",
        "phase",
        "pieces",
        "prompt_logprobs",
        "prompt_token_ids",
        "resampled",
        "timing",
        "token_ids",
        "trace",
    )

    def __init__(
        self,
        dispatch: Dispatch,
        stream: TextStream,
        accepted_ns: int,
        now_s: float,
        beams: BeamAnswers | None = None,
        answer: ChatAnswer | None = None,
        *,
        device_use: DeviceUse,
    ) -> None:
        job = dispatch.job
        assert job.prompt_token_ids is not None
        self.job = job
        self.adapter = dispatch.adapter
        self.kv_source = dispatch.kv_source
        self.prompt_token_ids = job.prompt_token_ids
        self.epoch = self.first_epoch = dispatch.epoch
        self.lives = {life.epoch: life for life in dispatch.lives}
        # Another attempt of the same request may still have outputs on their way.
        self.engine_id = f"{job.request_id}:{dispatch.epoch}"
        self._stream = stream
        self.token_ids = list(dispatch.resume_token_ids)
        self.pieces = stream.prime(dispatch.resume_token_ids)
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
        self.embedding = b""
        self.beams = beams
        self.answer = answer
        self.num_resumed = len(self.token_ids)
        self.num_cached_tokens = self._num_found_tokens = self.num_pulled_tokens = 0
        self.num_preemptions = 0
        self.num_proposed_tokens = self.num_accepted_tokens = 0
        self.resampled = False
        self.device_use = device_use
        self._is_charged = False
        self.phase = Phase.QUEUED
        self.timing = Timing(dispatch.sent_ns, accepted_ns)
        self.lease = LeaseState.of(dispatch, now_s)
        self.delivery = Delivery(self.num_resumed)
        if job.reply:
            self.delivery.add(self.listener(job.reply))
        self.known_outcome: GenerationOutcome | None = None
        self.outcome: GenerationOutcome | None = None
        self.trace: Trace | None = None

    def _enter(self, phase: Phase, at_ns: int) -> None:
        """The one transition of phases: only forward, and noted in ``timing``."""
        assert phase > self.phase, f"{self.phase.name} to {phase.name}"
        self.phase = phase
        match phase:
            case Phase.PREFILLING:
                self.timing.started_ns = at_ns
            case Phase.DECODING:
                self.timing.first_token_ns = at_ns
            case Phase.ENDED:
                self.timing.done_ns = at_ns

    def end(self, outcome: GenerationOutcome, now_ns: int) -> None:
        """Nothing of it is computed any more."""
        self.outcome = outcome
        self._enter(Phase.ENDED, now_ns)
        if self.answer is not None:
            self.answer.read(self.pieces)
            self.answer.finish(outcome.finish_reason, self.stop_reason)

    @property
    def request_id(self) -> str:
        return self.job.request_id

    @property
    def ended(self) -> bool:
        return self.phase is _ENDED

    @property
    def ran(self) -> bool:
        """Whether an engine computed anything for it, here or at an earlier attempt. A request that
        never ran costs nothing."""
        return bool(self.timing.started_ns or self.num_resumed)

    @property
    def num_tokens(self) -> int:
        """Of prompt and completion so far."""
        return len(self.prompt_token_ids) + len(self.token_ids)

    @property
    def priority(self) -> int:
        return PRIORITIES[self.job.tier]

    @property
    def num_completion_tokens(self) -> int:
        """Of all that was made, by earlier attempts too."""
        return len(self.token_ids) if self.beams is None else self.beams.num_tokens

    @property
    def finish_reason(self) -> FinishReason | None:
        """How its reader is told that it ended, if it ended well."""
        reason = None if self.outcome is None else self.outcome.finish_reason
        if reason is None or self.answer is None:
            return reason
        return self.answer.finish_reason(reason)

    @property
    def num_certain_tokens(self) -> int:
        """How many of its tokens say all that they ever will: the end of a completion may add to
        what its last token says."""
        num_tokens = len(self.token_ids)
        if self.answer is None or self.ended:
            return num_tokens
        self.answer.read(self.pieces)
        return num_tokens if self.answer.is_certain else max(num_tokens - 1, 0)

    @property
    def text(self) -> str:
        """Of a beam search that of its best answer."""
        return "".join(self.pieces) if self.beams is None else self.beams.text

    @property
    def stop_reason(self) -> str | int | None:
        """The stop string or the id of the stop token that ended it, if one did."""
        if self.outcome is None or self.outcome.finish_reason is not FinishReason.STOP:
            return None
        if self.beams is not None:
            return self.beams.ends[0].stop_reason
        if self._stream.stop_string is not None or not self.token_ids:
            return self._stream.stop_string
        last = self.token_ids[-1]
        return last if last in self.job.sampling.stop_token_ids else None

    def resumed_outcome(self, eos_token_ids: Sequence[int]) -> GenerationOutcome | None:
        """The outcome that the tokens of an earlier attempt had already reached, if any."""
        sampling = self.job.sampling
        if not self.token_ids:
            return None
        last = self.token_ids[-1]
        ends = last in sampling.stop_token_ids or (
            last in eos_token_ids and not sampling.ignore_eos
        )
        if self._stream.stopped:
            return outcomes.STOPPED
        if not ends and len(self.token_ids) < (sampling.max_tokens or 0):
            return None
        self.pieces[-1] += self._stream.flush()
        return outcomes.STOPPED if ends else outcomes.LENGTH_REACHED

    def apply(self, output: EngineOutput, now_ns: int) -> GenerationOutcome | None:
        """Add the output of a step; returns the outcome if it is the last one."""
        if self.phase is _QUEUED and (output.started or output.error is None):
            admitted_ns = self.timing.accepted_ns + round(output.queued_s * 1e9)
            self._enter(Phase.PREFILLING, min(now_ns, admitted_ns))
            self._num_found_tokens = output.num_cached_tokens
            self.num_pulled_tokens = output.num_pulled_tokens
            self.timing.note_pull(output.num_pulled_tokens, output.pulled_s)
            num_free = num_free_tokens(output, self.lives)
            self.num_cached_tokens = min(num_free, len(self.prompt_token_ids))
        elif output.num_cached_tokens > self._num_found_tokens and not output.started:
            # Some servers say it at the end only. Another engine's start says what it found anew.
            self._num_found_tokens = output.num_cached_tokens
            self.num_cached_tokens = min(output.num_cached_tokens, len(self.prompt_token_ids))
        self.resampled |= output.resampled
        self.num_preemptions += output.num_preemptions
        if output.num_proposed_tokens or output.num_accepted_tokens:
            self.num_proposed_tokens += output.num_proposed_tokens
            self.num_accepted_tokens += output.num_accepted_tokens
        if output.device_us:
            self.device_use.note(output.device_us)
        if output.prompt_logprobs:
            self.prompt_logprobs = output.prompt_logprobs
        if output.embedding:
            self.embedding = struct.pack(f"<{len(output.embedding)}f", *output.embedding)
        if output.token_ids and self.known_outcome is None:
            if self.phase is _PREFILLING:
                self._enter(Phase.DECODING, now_ns)
                if self.trace is not None:
                    self.trace.end_prefill(self)
            self.timing.last_token_ns = now_ns
            if self.beams is not None:
                return self.beams.add(output)
            if output.logprobs:
                self.logprobs.extend(output.logprobs)
            push, token_ids, pieces = self._stream.push, self.token_ids, self.pieces
            for token_id in output.token_ids:
                text, stopped = push(token_id)
                token_ids.append(token_id)
                pieces.append(text)
                if stopped:
                    del self.logprobs[len(token_ids) - self.num_resumed :]
                    return outcomes.STOPPED
        if output.error is not None:
            return outcomes.failed(*output.error)
        if output.finish_reason is None:
            return None
        if self.known_outcome is not None:
            return self.known_outcome
        if self.pieces:
            self.pieces[-1] += self._stream.flush()
        return GenerationOutcome(status=Status.DONE, finish_reason=output.finish_reason)

    def continues(self, token_ids: Sequence[int]) -> bool:
        """Whether a client that has ``token_ids`` can be given the rest of this generation."""
        return tuple(self.token_ids[: len(token_ids)]) == tuple(token_ids)

    def adopt(self, dispatch: Dispatch, worker_id: str, now_s: float) -> None:
        """Go on under a new lease and epoch, from the first token that the client has not got. What
        was thought to be an earlier run on ``worker_id`` may be this one."""
        self.lives |= {
            life.epoch: life
            for life in dispatch.lives
            if life.worker_id != worker_id or life.epoch < self.first_epoch
        }
        self.epoch = dispatch.epoch
        self.lease = LeaseState.of(dispatch, now_s)
        self.delivery.rewind(len(dispatch.resume_token_ids))

    def listener(self, reply: str) -> Listener:
        """A reader at ``reply``, with frames as the job asks for them."""
        return Listener(reply, self.job.batch_frames, self.job.frames_as_json)

    # --- frames ---

    def started_frame(self, worker_id: str) -> Started:
        return Started(
            epoch=self.epoch,
            worker_id=worker_id,
            num_prompt_tokens=len(self.prompt_token_ids),
            num_cached_tokens=self.num_cached_tokens,
        )

    def deltas(self, from_index: int) -> list[Frame]:
        """The tokens from ``from_index`` on, in frames of bounded size."""
        num_tokens = self.num_certain_tokens
        return [
            self._delta(start, min(start + MAX_TOKENS_PER_DELTA, num_tokens))
            for start in range(from_index, num_tokens, MAX_TOKENS_PER_DELTA)
        ]

    def pre_token_frames(self) -> list[Frame]:
        """Frames before the tokens, or in their place, as far as they are computed."""
        frames: list[Frame] = [*prompt_logprob_frames(self.epoch, self.prompt_logprobs)]
        if self.beams is not None:
            frames += self.beams.frames(self.epoch)
        if self.embedding:
            frames.append(Embedding(epoch=self.epoch, values=self.embedding))
        return frames

    def pop_unflushed(self) -> list[Frame]:
        """What the listeners have not been handed yet; it counts as handed then."""
        delivery = self.delivery
        frames = self.deltas(delivery.num_flushed)
        delivery.num_flushed = max(delivery.num_flushed, self.num_certain_tokens)
        if delivery.pre_token_flushed:
            return frames
        pre_token = self.pre_token_frames()
        delivery.pre_token_flushed = bool(pre_token or frames)
        return pre_token + frames

    def closing_frames(self) -> list[Frame]:
        """Usage, if there is any, and the terminal frame."""
        usage = self.usage()
        told = [] if usage is None else [msgspec.structs.replace(usage, epoch=self.epoch)]
        return [*told, self._terminal_frame()]

    def usage(self) -> Usage | None:
        """No tokens for a request that was refused for what it says; None for another one that
        never ran, which does not even count as a request. A prompt that another choice pays for
        counts no tokens."""
        if not self.ran:
            return Usage() if outcomes.is_refusal(self.outcome) else None
        reasoning = self.job.sampling.reasoning
        if self.beams is not None:
            num_thoughts = self.beams.num_reasoning_tokens
        else:
            num_thoughts = num_reasoning_tokens(reasoning, self.pieces) if reasoning else 0
        return Usage(
            prompt_tokens=self.num_paid_prompt_tokens,
            cached_tokens=0 if self.job.shares_prompt else self.num_cached_tokens,
            completion_tokens=self.num_completion_tokens,
            reasoning_tokens=num_thoughts,
            proposed_tokens=self.num_proposed_tokens,
            accepted_tokens=self.num_accepted_tokens,
        )

    @property
    def num_paid_prompt_tokens(self) -> int:
        """How many tokens of the prompt count and cost."""
        return 0 if self.job.shares_prompt else len(self.prompt_token_ids)

    def pop_served(self) -> Served | None:
        """What this attempt used, returned once; None if it never started, unless it failed so."""
        if self._is_charged or not (self.timing.started_ns or outcomes.is_failure(self.outcome)):
            return None
        self._is_charged = True
        num_made = self.num_completion_tokens - self.num_resumed
        num_prompt = len(self.prompt_token_ids)
        if self.known_outcome is None:
            num_prompt += self.num_resumed
        return Served(
            request_id=self.request_id,
            tenant=self.job.tenant,
            tier=self.job.tier,
            answer=self.timing.answer_of(self.outcome, self.job.received_ns, num_made),
            epoch=self.epoch,
            started_ns=self.timing.started_ns,
            device_us=self.device_use.total_us,
            energy_j=self.device_use.settle_energy(),
            prompt_tokens=num_prompt if self.timing.started_ns else 0,
            cached_tokens=self._num_found_tokens,
            completion_tokens=num_made,
            pulled_tokens=self.num_pulled_tokens,
            kv_source=pulled_from(self.kv_source, self.num_pulled_tokens),
        )

    @property
    def notices(self) -> Notices:
        """What the answer leaves out or does not keep, for its end."""
        notices = self.job.notices
        return notices if self.answer is None else bounded((*notices, *self.answer.notices))

    def _delta(self, start: int, end: int) -> Delta:
        skip = self.num_resumed
        logprobs = self.logprobs and self.logprobs[max(0, start - skip) : max(0, end - skip)]
        tokens = self.token_ids[start:end]
        if self.answer is None:
            return delta(self.epoch, start, tokens, self.pieces[start:end], logprobs)
        return Delta(
            epoch=self.epoch,
            index=start,
            token_ids=tuple(tokens),
            logprobs=tuple(logprobs),
            **self.answer.delta_fields(start, end),
        )

    def _terminal_frame(self) -> TerminalFrame:
        outcome, num_tokens = self.outcome, len(self.token_ids)
        assert outcome is not None
        failure = unanswered(outcome, self.epoch, num_tokens)
        if failure is not None:
            return failure
        assert self.finish_reason is not None
        return Done(
            epoch=self.epoch,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            num_tokens=num_tokens,
            num_prompt_logprobs=len(self.prompt_logprobs),
            embedding_bytes=len(self.embedding),
            beams=() if self.beams is None else self.beams.ends,
            notices=self.notices,
        )

"""One request as the bus side of a worker holds it, from its dispatch to its end."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

import msgspec

from schemas.control import Dispatch, Served
from schemas.frames import (
    Cancelled,
    Delta,
    Done,
    Embedding,
    Expired,
    Failed,
    FinishReason,
    Frame,
    PromptLogprobs,
    Started,
    TerminalFrame,
    TokenLogprob,
    Usage,
)
from schemas.jobs import Tier
from schemas.records import Status
from schemas.sampling import SamplingParams
from workers.engine.types import EngineOutput, EngineRequest
from workers.host.generations.device_use import DeviceUse
from workers.host.generations.output_text import TextStream

MAX_TOKENS_PER_DELTA = 1024
MAX_PROMPT_LOGPROBS_PER_FRAME = 512
_MAX_LISTENERS = 4
# Batch work has one below 0, so it makes way for everybody else's.
PRIORITIES = {tier: priority for priority, tier in enumerate(reversed(Tier), start=-1)}


class Listener(msgspec.Struct, frozen=True, array_like=True):
    """A listener, and how it wants its frames."""

    reply: str
    batch: bool
    as_json: bool


class GenerationOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """How a generation ended; one for each terminal frame that a worker sends."""

    status: Status
    finish_reason: FinishReason | None = None
    error_code: str = ""
    error_message: str = ""


STOPPED = GenerationOutcome(status=Status.DONE, finish_reason=FinishReason.STOP)
LENGTH_REACHED = GenerationOutcome(status=Status.DONE, finish_reason=FinishReason.LENGTH)
CANCELLED = GenerationOutcome(
    status=Status.CANCELLED, error_code="cancelled", error_message="The request was cancelled."
)
EXPIRED = GenerationOutcome(
    status=Status.EXPIRED,
    error_code="deadline_exceeded",
    error_message="The deadline passed before the end.",
)


class Trace(Protocol):
    """What a generation tells its trace; ``tracing.RunTrace`` is the one."""

    def add_event(self, name: str) -> None: ...

    def end_prefill(self, generation: Generation) -> None: ...

    def finish(self, generation: Generation) -> None: ...

    def record_published(self, generation: Generation) -> None: ...


class Generation:
    """A running request: its lease and epoch, its tokens and their text, and its times.

    ``token_ids`` and ``pieces`` run in parallel: ``pieces[i]`` is the text that token i added.
    The first ``num_resumed`` tokens were made by an earlier life and are with the client;
    ``num_flushed`` tokens have been handed to the listeners. ``logprobs`` has one entry for each
    token from ``num_resumed`` on, if the job asked for any; ``prompt_logprobs`` one for each of the
    prompt. ``embedding`` is little-endian float32, empty until it is there. With ``known_outcome``
    an earlier life made all the tokens, and only the prompt is left to be looked at. ``lives`` are
    the runs before this one, by epoch; it is this run from ``first_epoch`` on, under whatever later
    ones, and ``dispatched_ns`` is when the scheduler first sent it here. Times are UTC
    epoch in ns, 0 where it has not come so far. It is ``ended`` once ``outcome`` is set; nothing
    changes then but epoch, lease and listeners, when the job is dispatched here again. At
    ``confirmed_s``, on the monotonic clock, the lease was surely this worker's.
    """

    __slots__ = (
        "_is_charged",
        "_num_found_tokens",
        "_pre_token_flushed",
        "_stream",
        "accepted_ns",
        "confirmed_s",
        "device_use",
        "dispatched_ns",
        "done_ns",
        "embedding",
        "engine_id",
        "epoch",
        "first_epoch",
        "first_token_ns",
        "job",
        "known_outcome",
        "last_token_ns",
        "lease",
        "listeners",
        "lives",
        "logprobs",
        "num_cached_tokens",
        "num_flushed",
        "num_preemptions",
        "num_resumed",
        "outcome",
        "pieces",
        "prompt_logprobs",
        "prompt_token_ids",
        "reservation",
        "started_ns",
        "token_ids",
        "trace",
    )

    def __init__(
        self, dispatch: Dispatch, stream: TextStream, accepted_ns: int, confirmed_s: float
    ) -> None:
        job = dispatch.job
        assert job.prompt_token_ids is not None
        self.job = job
        self.prompt_token_ids = job.prompt_token_ids
        self.epoch = self.first_epoch = dispatch.epoch
        self.lease = dispatch.lease
        self.reservation = dispatch.reservation
        self.lives = {life.epoch: life for life in dispatch.lives}
        self.dispatched_ns = dispatch.sent_ns
        # Another run of the same request may still have outputs on their way.
        self.engine_id = f"{job.request_id}:{dispatch.epoch}"
        self.listeners: tuple[Listener, ...] = ()
        if job.reply:
            self.add_listener(job.reply)
        self._stream = stream
        self.token_ids = list(dispatch.resume_token_ids)
        self.pieces = stream.prime(dispatch.resume_token_ids)
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
        self.embedding = b""
        self._pre_token_flushed = False
        self.num_resumed = self.num_flushed = len(self.token_ids)
        self.num_cached_tokens = self._num_found_tokens = 0
        self.num_preemptions = 0
        self.device_use = DeviceUse()
        self._is_charged = False
        self.confirmed_s = confirmed_s
        self.accepted_ns = accepted_ns
        self.started_ns = self.first_token_ns = self.last_token_ns = self.done_ns = 0
        self.known_outcome: GenerationOutcome | None = None
        self.outcome: GenerationOutcome | None = None
        self.trace: Trace | None = None

    @property
    def request_id(self) -> str:
        return self.job.request_id

    @property
    def ended(self) -> bool:
        return self.outcome is not None

    @property
    def num_tokens(self) -> int:
        """Of prompt and completion so far."""
        return len(self.prompt_token_ids) + len(self.token_ids)

    @property
    def priority(self) -> int:
        return PRIORITIES[self.job.tier]

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def engine_request(self, eos_token_ids: Sequence[int], cache_salt: str) -> EngineRequest:
        sampling, token_ids = self.job.sampling, tuple(self.token_ids)
        if self.known_outcome is not None:
            # Behind a prompt that is looked at comes a token, which nobody needs.
            token_ids = ()
            sampling = SamplingParams(
                max_tokens=1, seed=sampling.seed, prompt_logprobs=sampling.prompt_logprobs
            )
        return EngineRequest(
            request_id=self.engine_id,
            prompt_token_ids=self.prompt_token_ids,
            sampling=sampling,
            eos_token_ids=tuple(eos_token_ids),
            output_token_ids=token_ids,
            priority=self.priority,
            cache_salt=cache_salt,
            pooling=self.job.pooling,
        )

    def resumed_outcome(self, eos_token_ids: Sequence[int]) -> GenerationOutcome | None:
        """The end that the tokens of an earlier life had already come to, if they had."""
        sampling = self.job.sampling
        if not self.token_ids:
            return None
        last = self.token_ids[-1]
        ends = last in sampling.stop_token_ids or (
            last in eos_token_ids and not sampling.ignore_eos
        )
        if self._stream.stopped:
            return STOPPED
        if not ends and len(self.token_ids) < (sampling.max_tokens or 0):
            return None
        self.pieces[-1] += self._stream.flush()
        return STOPPED if ends else LENGTH_REACHED

    def apply(self, output: EngineOutput, now_ns: int) -> GenerationOutcome | None:
        """Add what a step made; how the generation ended, if it did with this."""
        if not self.started_ns:
            self.started_ns = min(now_ns, self.accepted_ns + round(output.queued_s * 1e9))
            self._num_found_tokens = output.num_cached_tokens
            self.num_cached_tokens = min(output.num_cached_tokens, len(self.prompt_token_ids))
        self.num_preemptions += output.num_preemptions
        if output.device_us:
            self.device_use.note(output.device_us)
        if output.prompt_logprobs:
            self.prompt_logprobs = output.prompt_logprobs
        if output.embedding:
            self.embedding = struct.pack(f"<{len(output.embedding)}f", *output.embedding)
        if output.token_ids and self.known_outcome is None:
            if not self.first_token_ns:
                self.first_token_ns = now_ns
                if self.trace is not None:
                    self.trace.end_prefill(self)
            self.last_token_ns = now_ns
            if output.logprobs:
                self.logprobs.extend(output.logprobs)
            push, token_ids, pieces = self._stream.push, self.token_ids, self.pieces
            for token_id in output.token_ids:
                text, stopped = push(token_id)
                token_ids.append(token_id)
                pieces.append(text)
                if stopped:
                    del self.logprobs[len(token_ids) - self.num_resumed :]
                    return STOPPED
        if output.error is not None:
            code, message = output.error
            return GenerationOutcome(status=Status.FAILED, error_code=code, error_message=message)
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

    def adopt(self, dispatch: Dispatch, worker_id: str, confirmed_s: float) -> None:
        """Go on under a new lease and epoch, from the first token that the client has not got. What
        was thought to be an earlier run on ``worker_id`` may be this one."""
        self.lives |= {
            life.epoch: life
            for life in dispatch.lives
            if life.worker_id != worker_id or life.epoch < self.first_epoch
        }
        self.epoch = dispatch.epoch
        self.lease = dispatch.lease
        self.reservation = dispatch.reservation
        self.confirmed_s = confirmed_s
        self.num_flushed = min(self.num_flushed, len(dispatch.resume_token_ids))
        self._pre_token_flushed = False

    def add_listener(self, reply: str) -> None:
        """Send later frames to ``reply`` too; of many listeners the first and the newest stay."""
        listener = Listener(reply, self.job.batch_frames, self.job.frames_as_json)
        if listener in self.listeners:
            return
        if len(self.listeners) == _MAX_LISTENERS:
            self.listeners = (self.listeners[0], *self.listeners[2:])
        self.listeners = (*self.listeners, listener)

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
        return [
            self._delta(start, min(start + MAX_TOKENS_PER_DELTA, len(self.token_ids)))
            for start in range(from_index, len(self.token_ids), MAX_TOKENS_PER_DELTA)
        ]

    def pre_token_frames(self) -> list[Frame]:
        """What goes before the tokens, or in their place, as far as it is there."""
        frames: list[Frame] = [
            PromptLogprobs(
                epoch=self.epoch,
                index=start,
                logprobs=self.prompt_logprobs[start : start + MAX_PROMPT_LOGPROBS_PER_FRAME],
            )
            for start in range(0, len(self.prompt_logprobs), MAX_PROMPT_LOGPROBS_PER_FRAME)
        ]
        if self.embedding:
            frames.append(Embedding(epoch=self.epoch, values=self.embedding))
        return frames

    def pop_unflushed(self) -> list[Frame]:
        """What the listeners have not been handed yet; it counts as handed then."""
        frames = self.deltas(self.num_flushed)
        self.num_flushed = len(self.token_ids)
        if self._pre_token_flushed:
            return frames
        pre_token = self.pre_token_frames()
        self._pre_token_flushed = bool(pre_token or frames)
        return pre_token + frames

    def closing_frames(self) -> list[Frame]:
        """Usage and the terminal frame."""
        return [msgspec.structs.replace(self.usage(), epoch=self.epoch), self._terminal_frame()]

    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=len(self.prompt_token_ids),
            cached_tokens=self.num_cached_tokens,
            completion_tokens=len(self.token_ids),
        )

    def pop_served(self) -> Served | None:
        """What this run took, to be told once; None if it never began, or was told before."""
        if not self.started_ns or self._is_charged:
            return None
        self._is_charged = True
        num_resumed = self.num_resumed if self.known_outcome is None else 0
        return Served(
            request_id=self.request_id,
            tenant=self.job.tenant,
            tier=self.job.tier,
            epoch=self.epoch,
            started_ns=self.started_ns,
            device_us=self.device_use.total_us,
            prompt_tokens=len(self.prompt_token_ids) + num_resumed,
            cached_tokens=self._num_found_tokens,
            completion_tokens=len(self.token_ids) - self.num_resumed,
        )

    def _delta(self, start: int, end: int) -> Delta:
        pieces = self.pieces[start:end]
        logprobs = self.logprobs
        if logprobs:
            skip = self.num_resumed
            logprobs = logprobs[max(0, start - skip) : max(0, end - skip)]
        return Delta(
            epoch=self.epoch,
            index=start,
            token_ids=tuple(self.token_ids[start:end]),
            text="".join(pieces),
            text_ends=tuple(accumulate(map(len, pieces))) if len(pieces) > 1 else (),
            logprobs=tuple(logprobs),
        )

    def _terminal_frame(self) -> TerminalFrame:
        outcome, epoch, num_tokens = self.outcome, self.epoch, len(self.token_ids)
        assert outcome is not None
        match outcome.status:
            case Status.CANCELLED:
                return Cancelled(epoch=epoch, num_tokens=num_tokens)
            case Status.EXPIRED:
                return Expired(epoch=epoch, num_tokens=num_tokens)
            case Status.FAILED:
                return Failed(epoch=epoch, code=outcome.error_code, message=outcome.error_message)
            case _:
                assert outcome.finish_reason is not None
                return Done(
                    epoch=epoch,
                    finish_reason=outcome.finish_reason,
                    num_tokens=num_tokens,
                    num_prompt_logprobs=len(self.prompt_logprobs),
                    embedding_bytes=len(self.embedding),
                )

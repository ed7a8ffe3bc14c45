"""A worker and scheduler in one, without a model: pulls jobs itself and answers with frames.

What it says is scripted: by default the prompt's own token ids are its text, one byte a token.
"""

from __future__ import annotations

import asyncio
import itertools
import struct
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from millrace.bus.api import Bus
from millrace.bus.job_queue import LeasedJob
from millrace.bus.transport import Subscription
from millrace.registry.reasoning import num_reasoning_tokens
from millrace.runtime.clock import Clock, SystemClock
from millrace.schemas.control import (
    Cancel,
    Replay,
    ResetPrefixCache,
    WorkerCommand,
    WorkerReply,
    WorkerStatus,
)
from millrace.schemas.errors import BusUnavailableError
from millrace.schemas.frames import (
    Beam,
    BeamEnd,
    Cancelled,
    Delta,
    Done,
    Embedding,
    FinishReason,
    Frame,
    PromptLogprobs,
    Started,
    TokenLogprob,
    Usage,
)
from millrace.schemas.jobs import BeamResult, Job, JobResult
from millrace.schemas.pooling import Pooling
from millrace.schemas.records import Status
from tests.support.model_queue import ModelQueue

Script = Callable[[Job], Sequence[str]]
EMBEDDING_SIZE = 8
_HEARTBEAT_S = 0.5
_PULL_S = 0.5
_AWAY_S = 0.02


def echo_script(job: Job) -> str:
    """The prompt's text again, as far as ``max_tokens`` goes."""
    return bytes(job.prompt_token_ids or ()).decode(errors="replace")


class EchoWorker:
    """Answers jobs of one model with the texts of a script's tokens, a character each by default.

    No token leaves while ``gate`` is closed. It falls silent before token ``stop_before``, or
    sends ``end_with`` there (at once, if there is no ``stop_before``). It says ``stop_reason`` of
    what it ended well, and tells ``num_labels`` of texts that are classified. Frames that ``lose``
    picks are never sent; they are still there for a replay. ``answer_ids`` are the tokens of its
    answers, in place of their indices. The likeliest tokens are those from ``first_rank`` behind
    the chosen one on. ``num_resets`` of its prefix cache were asked for, which it refuses with the
    reason ``keeps_prefixes`` if that is set.
    """

    def __init__(
        self,
        bus: Bus,
        model: str = "echo",
        *,
        worker_id: str = "echo-1",
        script: Script = echo_script,
        tokens_per_frame: int = 1,
        clock: Clock | None = None,
    ) -> None:
        self.bus = bus
        self.model = model
        self.worker_id = worker_id
        self.script = script
        self.tokens_per_frame = tokens_per_frame
        self.clock = clock or SystemClock()
        self.jobs: list[Job] = []
        self.cancelled: list[str] = []
        self.replays: list[Replay] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.stop_before: int | None = None
        self.end_with: Frame | None = None
        self.stop_reason: str | int | None = None
        self.num_labels = 1
        self.answer_ids: Sequence[int] = ()
        self.first_rank = 0
        self.num_resets = 0
        self.keeps_prefixes = ""
        self.lose: Callable[[Frame], bool] = lambda _frame: False
        self.epoch = 0
        self._sent: dict[str, list[Frame]] = {}
        self._listeners: dict[str, list[str]] = {}
        self._running: dict[str, asyncio.Task[None]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._subscriptions: list[Subscription] = []
        self._queue = ModelQueue(bus, model)

    async def start(self) -> None:
        await self.announce()
        self._subscriptions = [
            await self.bus.control.serve_commands(self.worker_id, self._on_command),
            await self.bus.control.subscribe_cancels(self._on_cancel),
        ]
        self._tasks = [
            asyncio.create_task(self._pull_forever()),
            asyncio.create_task(self._beat_forever()),
        ]

    async def close(self) -> None:
        tasks = [*self._tasks, *self._running.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for subscription in (*self._subscriptions, self._queue):
            await subscription.close()

    @property
    def num_running(self) -> int:
        return len(self._running)

    async def announce(self, *, retired: bool = False) -> None:
        await self.bus.workers.announce(
            WorkerStatus(
                worker_id=self.worker_id,
                name=self.worker_id,
                model=self.model,
                max_num_sequences=64,
                num_running=len(self._running),
                retired=retired,
                sent_ns=self.clock.now_ns(),
            )
        )

    async def _beat_forever(self) -> None:
        while True:
            await self.clock.sleep(_HEARTBEAT_S)
            await self.announce()

    async def _pull_forever(self) -> None:
        while True:
            try:
                pulled = await self._queue.pull(16, _PULL_S)
            except BusUnavailableError:
                await self.clock.sleep(_AWAY_S)
                continue
            for leased in pulled:
                self.jobs.append(leased.job)
                request_id = leased.job.request_id
                task = asyncio.create_task(self._run(leased))
                self._running[request_id] = task
                task.add_done_callback(partial(self._forget, request_id))

    def _forget(self, request_id: str, _task: asyncio.Task[None]) -> None:
        self._running.pop(request_id, None)

    async def _run(self, leased: LeasedJob) -> None:
        job = leased.job
        try:
            await self._generate(job)
        except asyncio.CancelledError:
            if job.request_id not in self.cancelled:
                raise
            await self._send(job, Cancelled(epoch=self.epoch))
        else:
            if job.store_result and self.end_with is None:
                await self._store_result(job)
        await self.bus.jobs.ack(leased.lease)

    async def _generate(self, job: Job) -> None:
        num_prompt = len(job.prompt_token_ids or ())
        epoch = self.epoch
        if self.end_with is not None and self.stop_before is None:
            await self._send(job, self.end_with)
            return
        await self._send(
            job, Started(worker_id=self.worker_id, num_prompt_tokens=num_prompt, epoch=epoch)
        )
        if job.pooling is not None:
            await self._embed(job)
            return
        if job.sampling.use_beam_search:
            await self._search(job)
            return
        num_prompt_top = job.sampling.prompt_logprobs
        if num_prompt_top is not None:
            # Their bytes are their ranks, so that those beyond the alternatives can be told.
            entries = [
                msgspec.structs.replace(_logprob(token_id, num_prompt_top), rank=token_id)
                for token_id in job.prompt_token_ids or ()
            ]
            frame = PromptLogprobs(logprobs=(None, *entries[1:]), epoch=epoch)
            await self._send(job, frame)
        limit = job.sampling.max_tokens
        whole = self.script(job)
        texts = whole[:limit]
        for index in range(0, len(texts), self.tokens_per_frame):
            if index == self.stop_before:
                if self.end_with is not None:
                    await self._send(job, self.end_with)
                    return
                await asyncio.Event().wait()
            await self.gate.wait()
            piece = texts[index : index + self.tokens_per_frame]
            delta = delta_of(index, piece, epoch)
            if self.answer_ids:
                ids = tuple(self.answer_ids[index : index + len(piece)])
                delta = msgspec.structs.replace(delta, token_ids=ids)
            await self._send(job, _with_logprobs(job, delta, self.first_rank))
            await asyncio.sleep(0)
        reasoning = job.sampling.reasoning
        usage = Usage(
            prompt_tokens=job.num_paid_prompt_tokens,
            completion_tokens=len(texts),
            reasoning_tokens=num_reasoning_tokens(reasoning, texts) if reasoning else 0,
            epoch=epoch,
        )
        await self._send(job, usage)
        reason = FinishReason.LENGTH if len(whole) > len(texts) else FinishReason.STOP
        done = Done(
            finish_reason=reason,
            stop_reason=self.stop_reason,
            num_tokens=len(texts),
            epoch=epoch,
        )
        await self._send(job, done)

    async def _search(self, job: Job) -> None:
        """Answer a beam search with the script's text, each further beam with one more mark."""
        await self.gate.wait()
        whole, limit, epoch = self.script(job), job.sampling.max_tokens, self.epoch
        ends: list[BeamEnd] = []
        for beam in range(job.sampling.n):
            texts = [*whole, *"!" * beam][:limit]
            ids = tuple(range(100 * beam, 100 * beam + len(texts)))
            for part in (slice(1), slice(1, None)):
                await self._send(
                    job,
                    Beam(
                        beam=beam,
                        index=part.start or 0,
                        token_ids=ids[part],
                        text="".join(texts[part]),
                        epoch=epoch,
                    ),
                )
            is_cut = len(whole) + beam > len(texts)
            reason = FinishReason.LENGTH if is_cut else FinishReason.STOP
            stop = None if is_cut or beam == 0 else beam
            ends.append(BeamEnd(num_tokens=len(texts), finish_reason=reason, stop_reason=stop))
        num_prompt = len(job.prompt_token_ids or ())
        num_tokens = sum(end.num_tokens for end in ends)
        usage = Usage(prompt_tokens=num_prompt, completion_tokens=num_tokens, epoch=epoch)
        await self._send(job, usage)
        best = ends[0].finish_reason
        await self._send(
            job, Done(finish_reason=best, num_tokens=0, beams=tuple(ends), epoch=epoch)
        )

    async def _embed(self, job: Job) -> None:
        await self.gate.wait()
        num_prompt, epoch = len(job.prompt_token_ids or ()), self.epoch
        is_classified = job.pooling is Pooling.CLASSIFY
        values = labels_of(job, self.num_labels) if is_classified else embedding_of(job)
        await self._send(job, Embedding(values=values, epoch=epoch))
        await self._send(job, Usage(prompt_tokens=num_prompt, epoch=epoch))
        done = Done(
            finish_reason=FinishReason.STOP,
            num_tokens=0,
            embedding_bytes=len(values),
            epoch=epoch,
        )
        await self._send(job, done)

    async def _send(self, job: Job, frame: Frame) -> None:
        self._sent.setdefault(job.request_id, []).append(frame)
        if self.lose(frame):
            return
        for reply in (job.reply, *self._listeners.get(job.request_id, ())):
            if reply:
                await self.bus.frames.publish(
                    reply, [(job.request_id, frame)], batch=job.batch_frames
                )

    def forget(self, request_id: str) -> None:
        """Know nothing of a request any more, as some time after its end."""
        self._sent.pop(request_id, None)

    async def _store_result(self, job: Job) -> None:
        frames = self._sent[job.request_id]
        deltas = [frame for frame in frames if isinstance(frame, Delta)]
        text = "".join(delta.text for delta in deltas)
        token_ids = tuple(token for delta in deltas for token in delta.token_ids)
        assert all(len(delta.token_ids) == 1 for delta in deltas), "stored token by token"
        await self.bus.results.store(
            JobResult(
                request_id=job.request_id,
                tenant=job.tenant,
                model=job.model,
                status=Status.DONE,
                text=text,
                token_ids=token_ids,
                text_ends=tuple(itertools.accumulate(len(delta.text) for delta in deltas)),
                beams=_results_of(frames),
                finish_reason=next(f.finish_reason for f in frames if isinstance(f, Done)),
                stop_reason=self.stop_reason,
                usage=next(frame for frame in frames if isinstance(frame, Usage)),
            )
        )

    def _on_cancel(self, cancel: Cancel) -> None:
        task = self._running.get(cancel.request_id)
        if task is not None and cancel.request_id not in self.cancelled:
            self.cancelled.append(cancel.request_id)
            task.cancel()

    async def _on_command(self, command: WorkerCommand) -> WorkerReply:
        if isinstance(command, ResetPrefixCache):
            self.num_resets += 1
            why = self.keeps_prefixes
            return WorkerReply(ok=not why, reason="prefix_cache_kept" if why else "", message=why)
        if not isinstance(command, Replay):
            return WorkerReply(ok=False, reason="bad_request")
        self.replays.append(command)
        frames = self._sent.get(command.request_id)
        if frames is None:
            return WorkerReply(ok=False, reason="unknown_request")
        listeners = self._listeners.setdefault(command.request_id, [])
        own = {job.reply for job in self.jobs if job.request_id == command.request_id}
        if command.reply not in own.union(listeners):
            listeners.append(command.reply)
        await self.bus.frames.publish(
            command.reply, [(command.request_id, frame) for frame in frames], batch=True
        )
        return WorkerReply(ok=True)


def _results_of(frames: Sequence[Frame]) -> tuple[BeamResult, ...]:
    """The answers of a beam search."""
    ends = next(frame.beams for frame in frames if isinstance(frame, Done))
    results: list[BeamResult] = []
    for beam, end in enumerate(ends):
        parts = [frame for frame in frames if isinstance(frame, Beam) and frame.beam == beam]
        results.append(
            BeamResult(
                **msgspec.structs.asdict(end),
                text="".join(part.text for part in parts),
                token_ids=tuple(token for part in parts for token in part.token_ids),
            )
        )
    return tuple(results)


def _with_logprobs(job: Job, delta: Delta, first_rank: int) -> Delta:
    """Add logprobs: -0.5 for each token, and slightly less for each requested alternative."""
    num_top = job.sampling.logprobs
    if num_top is None:
        return delta
    return msgspec.structs.replace(
        delta,
        logprobs=tuple(_logprob(token_id, num_top, first_rank) for token_id in delta.token_ids),
    )


def _logprob(token_id: int, num_top: int, first_rank: int = 0) -> TokenLogprob:
    ranks = range(first_rank, first_rank + num_top)
    top = tuple(((token_id + rank) % 256, -0.5 - rank) for rank in ranks)
    return TokenLogprob(token_id, -0.5, top)


def embedding_of(job: Job) -> bytes:
    """The pooling's length, then the first of the prompt's token ids, as numbers."""
    numbers = [len(job.pooling or ""), *(job.prompt_token_ids or ())][:EMBEDDING_SIZE]
    return struct.pack(f"<{EMBEDDING_SIZE}f", *numbers, *[0] * (EMBEDDING_SIZE - len(numbers)))


def labels_of(job: Job, num_labels: int) -> bytes:
    """Return the prompt's last token ids as numbers; letters are near 0."""
    numbers = [(token_id - 108) / 4 for token_id in (job.prompt_token_ids or ())[-num_labels:]]
    return struct.pack(f"<{num_labels}f", *numbers, *[0.0] * (num_labels - len(numbers)))


def delta_of(index: int, texts: Sequence[str], epoch: int = 0) -> Delta:
    """A frame of tokens with these texts; token ids are their indices."""
    ends = tuple(itertools.accumulate(map(len, texts)))
    return Delta(
        index=index,
        token_ids=tuple(range(index, index + len(texts))),
        text="".join(texts),
        text_ends=ends if len(texts) > 1 else (),
        epoch=epoch,
    )

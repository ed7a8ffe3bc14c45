"""Worker without a model: it accepts dispatches, and a test ends its jobs."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter

from millrace.bus.api import Bus
from millrace.bus.transport import Subscription
from millrace.runtime.clock import Clock
from millrace.schemas.control import (
    AnswerTimes,
    Cancel,
    CancelReason,
    Dispatch,
    Drain,
    Ended,
    Prefilled,
    Replay,
    ResetPrefixCache,
    Served,
    SetRole,
    Warm,
    WorkerCommand,
    WorkerReply,
    WorkerStatus,
)
from millrace.schemas.engines import WorkerRole
from millrace.schemas.errors import MillraceError
from millrace.schemas.frames import Done, FinishReason
from millrace.schemas.records import RequestRecord, Status
from millrace.schemas.transfer import TransferEndpoint

_HEARTBEAT_S = 0.5
_LEASE_EXTEND_S = 2.0
_BLOCK_TOKENS = 16
_lives = itertools.count(1)


class ScriptedWorker:
    """Holds up to ``num_slots`` requests. ``rejection`` is why it refuses them, ``mute``
    makes it answer nothing. ``history`` is every dispatch that it accepted. With ``device_us`` it
    tells what runs took that others go on from, ``last_word_after_s`` they are over here.
    ``answer`` is what it tells schedulers of how a request ended."""

    def __init__(
        self,
        bus: Bus,
        clock: Clock,
        name: str = "w",
        model: str = "m",
        num_slots: int = 4,
        num_blocks: int = 1_000,
        max_tokens_per_request: int = 0,
    ) -> None:
        self.bus = bus
        self.clock = clock
        self.name = name
        self.worker_id = f"{name}-{next(_lives)}"
        self.model = model
        self.num_slots = num_slots
        self.num_blocks = num_blocks
        self.max_tokens_per_request = max_tokens_per_request
        self.rejection = ""
        self.mute = False
        self.draining = False
        self.engine_down = False
        self.tells_ends = True
        self.decode_step_ms = 0.0
        self.device_us = 0
        self.max_adapters = 0
        self.last_word_after_s = 0.0
        self.role = WorkerRole.BOTH
        self.weights: str | None = None
        self.transfer: TransferEndpoint | None = None
        self.pull_tokens_per_s = 0.0
        self.prefill_tokens_per_s = 0.0
        self.outstanding_prompt_tokens = 0
        self.answer = AnswerTimes(status=Status.DONE)
        self.running: dict[str, Dispatch] = {}
        self.history: list[Dispatch] = []
        self.replays: list[Replay] = []
        self.warmed: list[Warm] = []
        self.warms_when: asyncio.Event | None = None
        self.set_roles: list[WorkerRole] = []
        self.refuses_to_warm = False
        self.outstanding_pull_tokens = 0
        self.cancels: list[Cancel] = []
        self.alive = False
        self._started_ns = clock.now_ns()
        self._subscriptions: list[Subscription] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> ScriptedWorker:
        self.alive = True
        self._started_ns = self.clock.now_ns()
        control = self.bus.control
        self._subscriptions = [
            await control.serve_commands(self.worker_id, self._on_command),
            await control.subscribe_cancels(self._on_cancel),
        ]
        await self.announce()
        self._tasks = [
            asyncio.create_task(self._beat()),
            asyncio.create_task(self._hold_leases()),
        ]
        return self

    async def kill(self) -> None:
        """Die as by kill -9: no message, and no subscription remains."""
        self.alive = False
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for subscription in self._subscriptions:
            await subscription.close()
        self.running.clear()

    async def retire(self) -> None:
        await self.announce(retired=True)
        await self.kill()

    def status(self, *, retired: bool = False) -> WorkerStatus:
        used = sum(
            -(-len(d.job.prompt_token_ids or ()) // _BLOCK_TOKENS) for d in self.running.values()
        )
        return WorkerStatus(
            worker_id=self.worker_id,
            name=self.name,
            model=self.model,
            max_num_sequences=self.num_slots,
            num_running=len(self.running),
            num_held_by_tier=Counter(d.job.tier for d in self.running.values()),
            block_size_tokens=_BLOCK_TOKENS,
            num_blocks=self.num_blocks,
            num_free_blocks=self.num_blocks - used,
            max_tokens_per_request=self.max_tokens_per_request,
            outstanding_tokens=sum(d.job.sampling.max_tokens or 0 for d in self.running.values()),
            decode_step_ms=self.decode_step_ms,
            max_adapters=self.max_adapters,
            role=self.role,
            weights=self.weights,
            transfer=self.transfer,
            pull_tokens_per_s=self.pull_tokens_per_s,
            outstanding_pull_tokens=self.outstanding_pull_tokens,
            prefill_tokens_per_s=self.prefill_tokens_per_s,
            outstanding_prompt_tokens=self.outstanding_prompt_tokens,
            draining=self.draining,
            engine_down=self.engine_down,
            retired=retired,
            started_ns=self._started_ns,
            sent_ns=self.clock.now_ns(),
        )

    async def announce(self, *, retired: bool = False) -> None:
        await self.bus.workers.announce(self.status(retired=retired))

    def hand_over_blocks(self) -> None:
        """Serve blocks that the other workers that do so can pull."""
        self.weights = "x"
        self.transfer = TransferEndpoint(layout="l", token="t", socket=self.worker_id)

    async def tell_prefilled(self, request_id: str) -> None:
        """The first token of a request is out."""
        prefilled = Prefilled(worker_id=self.worker_id, request_ids=(request_id,))
        await self.bus.control.publish_prefilled(prefilled)

    async def finish(self, request_id: str) -> None:
        """Answer a request: frame, record, ack, notice."""
        dispatch = self.running.pop(request_id)
        job = dispatch.job
        done = Done(finish_reason=FinishReason.STOP, num_tokens=1, epoch=dispatch.epoch)
        readers = [one.reply for one in self.replays if one.request_id == request_id]
        for reply in filter(None, (job.reply, *readers)):
            await self.bus.frames.publish(reply, [(request_id, done)])
        await self.bus.outbox.publish(
            RequestRecord(request_id=request_id, tenant=job.tenant, epoch=dispatch.epoch)
        )
        await self.bus.jobs.ack(dispatch.lease)
        if self.tells_ends:
            await self.bus.control.publish_ended(
                Ended(
                    worker_id=self.worker_id,
                    request_ids=(request_id,),
                    served=(self._served(dispatch),),
                )
            )

    def _served(self, dispatch: Dispatch) -> Served:
        job = dispatch.job
        return Served(
            request_id=job.request_id,
            tenant=job.tenant,
            tier=job.tier,
            epoch=dispatch.epoch,
            answer=self.answer,
            started_ns=dispatch.sent_ns + 1,
            device_us=self.device_us,
            prompt_tokens=len(job.prompt_token_ids or ()),
            completion_tokens=job.sampling.max_tokens or 0,
        )

    async def return_job(self, request_id: str) -> None:
        """Return a job to the scheduler, as a worker does that ends before the job."""
        dispatch = self.running.pop(request_id)
        await self.bus.jobs.release(dispatch.lease)
        await self.bus.control.publish_ended(
            Ended(
                worker_id=self.worker_id,
                request_ids=(request_id,),
                served=(self._served(dispatch),) if self.device_us else (),
                released=(request_id,),
            )
        )

    async def finish_all(self) -> None:
        for request_id in list(self.running):
            await self.finish(request_id)

    async def _on_command(self, command: WorkerCommand) -> WorkerReply:
        match command:
            case Dispatch():
                return await self._on_dispatch(command)
            case Cancel():
                self._on_cancel(command)
                return WorkerReply(ok=True)
            case Warm():
                if self.refuses_to_warm:
                    return WorkerReply(ok=False, reason="bad_request")
                self.warmed.append(command)
                if self.warms_when is not None:
                    await self.warms_when.wait()
                return WorkerReply(ok=True)
            case SetRole():
                if command.from_role not in (None, self.role):
                    return WorkerReply(ok=False, reason="stale_role")
                self.role = command.role
                self.set_roles.append(command.role)
                await self.announce()
                return WorkerReply(ok=True)
            case Replay():
                if command.request_id not in self.running:
                    return WorkerReply(ok=False, reason="unknown_request")
                self.replays.append(command)
                return WorkerReply(ok=True)
            case Drain() | ResetPrefixCache():
                return WorkerReply(ok=False, reason="bad_request")

    async def _on_dispatch(self, dispatch: Dispatch) -> WorkerReply:
        if self.mute:
            await asyncio.Event().wait()
        if self.rejection:
            return WorkerReply(ok=False, reason=self.rejection, message="as told")
        known = self.running.get(dispatch.job.request_id)
        if known is not None and dispatch.epoch <= known.epoch:
            return WorkerReply(ok=False, reason="stale_epoch")
        if known is None and len(self.running) >= self.num_slots:
            return WorkerReply(ok=False, reason="full")
        self.running[dispatch.job.request_id] = dispatch
        self.history.append(dispatch)
        return WorkerReply(ok=True)

    def _on_cancel(self, cancel: Cancel) -> None:
        self.cancels.append(cancel)
        known = self.running.get(cancel.request_id)
        if known is None:
            return
        if cancel.reason is CancelReason.SUPERSEDED and known.epoch < (cancel.below_epoch or 0):
            del self.running[cancel.request_id]
            if self.device_us:
                self._tasks.append(asyncio.create_task(self._tell(known)))

    async def _tell(self, dispatch: Dispatch) -> None:
        """Publish the usage of an attempt that another attempt continues."""
        await self.clock.sleep(self.last_word_after_s)
        served = (self._served(dispatch),)
        request_ids = (dispatch.job.request_id,)
        await self.bus.control.publish_ended(
            Ended(worker_id=self.worker_id, request_ids=request_ids, served=served)
        )

    async def _beat(self) -> None:
        while True:
            await self.clock.sleep(_HEARTBEAT_S)
            await self.announce()

    async def _hold_leases(self) -> None:
        while True:
            await self.clock.sleep(_LEASE_EXTEND_S)
            for dispatch in list(self.running.values()):
                try:
                    await self.bus.jobs.extend(dispatch.lease)
                except MillraceError:
                    break

"""An echo worker for jobs that are not streamed: it stores their results, as a real worker does."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter

from millrace.bus.api import Bus
from millrace.bus.job_queue import LeasedJob
from millrace.schemas.frames import FinishReason, Usage
from millrace.schemas.jobs import BeamResult, Job, JobResult
from millrace.schemas.records import Status
from tests.support.echo_worker import EchoWorker, embedding_of


class BatchWorker(EchoWorker):
    """``answers`` counts the answers made for each request id. A job whose prompt is in ``shed`` is
    shed once, one in ``fail`` fails with ``fail_code``. None is answered while ``gate`` is closed,
    which it is by itself after ``hold_after`` answers."""

    def __init__(self, bus: Bus, model: str = "echo") -> None:
        super().__init__(bus, model)
        self.answers: Counter[str] = Counter()
        self.shed: set[str] = set()
        self.fail: set[str] = set()
        self.fail_code = "engine_error"
        self.hold_after: int | None = None

    def release(self) -> None:
        """Answer everything from now on."""
        self.hold_after = None
        self.gate.set()

    async def _run(self, leased: LeasedJob) -> None:
        job = leased.job
        if not job.store_result:
            await super()._run(leased)
            return
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            if job.request_id not in self.cancelled:
                raise
            await self.bus.results.store(result_of(job, Status.CANCELLED))
            await self.bus.jobs.ack(leased.lease)
            return
        self.answers[job.request_id] += 1
        if self.hold_after is not None and len(self.answers) >= self.hold_after:
            self.gate.clear()
        prompt = bytes(job.prompt_token_ids or ()).decode()
        if prompt in self.shed:
            self.shed.discard(prompt)
            result = result_of(job, Status.SHED)
        elif prompt in self.fail:
            result = result_of(job, Status.FAILED, code=self.fail_code, message="It broke.")
        else:
            result = self._answer(job)
        await self.bus.results.store(result)
        await self.bus.jobs.ack(leased.lease)

    def _answer(self, job: Job) -> JobResult:
        num_prompt = job.num_paid_prompt_tokens
        if job.pooling is not None:
            usage = Usage(prompt_tokens=num_prompt)
            return result_of(job, Status.DONE, embedding=embedding_of(job), usage=usage)
        texts = list(self.script(job))[: job.sampling.max_tokens]
        if job.sampling.use_beam_search:
            beams = _beams(texts, job.sampling.n)
            num_tokens = sum(beam.num_tokens for beam in beams)
            usage = Usage(prompt_tokens=num_prompt, completion_tokens=num_tokens)
            return result_of(job, Status.DONE, beams=beams, usage=usage)
        return result_of(
            job,
            Status.DONE,
            text="".join(texts),
            token_ids=tuple(range(len(texts))),
            text_ends=tuple(itertools.accumulate(map(len, texts))),
            usage=Usage(prompt_tokens=num_prompt, completion_tokens=len(texts)),
        )


def _beams(texts: list[str], width: int) -> tuple[BeamResult, ...]:
    """The text, then without its last token, and so on; ids are too many to be stored."""
    return tuple(
        BeamResult(
            num_tokens=len(texts) - less,
            finish_reason=FinishReason.STOP,
            text="".join(texts[: len(texts) - less]),
        )
        for less in range(width)
    )


def result_of(
    job: Job,
    status: Status,
    *,
    code: str = "",
    message: str = "",
    text: str = "",
    token_ids: tuple[int, ...] = (),
    text_ends: tuple[int, ...] = (),
    embedding: bytes = b"",
    usage: Usage | None = None,
    beams: tuple[BeamResult, ...] = (),
) -> JobResult:
    """Make the stored result of a job."""
    return JobResult(
        request_id=job.request_id,
        tenant=job.tenant,
        model=job.model,
        status=status.value,
        text=text,
        token_ids=token_ids,
        text_ends=text_ends,
        embedding=embedding,
        finish_reason=FinishReason.STOP if status is Status.DONE else None,
        usage=usage,
        beams=beams,
        error_code=code,
        error_message=message,
    )

"""Jobs that the gateway itself reads to their end: embeddings, and its own generations."""

from __future__ import annotations

import asyncio

from msgspec.structs import replace

from millrace.bus.frame_reader import StreamReader
from millrace.gateway.errors import DrainingError, refusal_of_end
from millrace.gateway.request.job_maker import bare_job
from millrace.gateway.request.response_stream import ResponseContext
from millrace.gateway.request.submitter import publish_jobs
from millrace.gateway.streams.stream import Client, OpenStream
from millrace.gateway.tenancy.identity import Caller
from millrace.registry.requests.generation_request import GenerationRequest
from millrace.registry.requests.ready_jobs import with_prompt
from millrace.schemas.chat.asked import Api
from millrace.schemas.errors import MillraceError
from millrace.schemas.frames import Done
from millrace.schemas.jobs import Job, Tier

_NS_PER_S = 1_000_000_000


class InternalGenerationError(
    MillraceError, code="generation_failed", retryable=True, http_status=503
):
    """Failure of the gateway's own generation, which no client waits for."""


class _JobClient(Client):
    """Client that collects the text of one stream. It reads at once, so only a shutdown of the
    gateway drops it.
    """

    def __init__(self, context: ResponseContext) -> None:
        super().__init__(limit_bytes=2**62)
        self.texts: list[str] = []
        self._context = context
        self._dropped = False
        self._over = asyncio.Event()

    def wake(self, stream: OpenStream) -> None:
        now_s = self._context.clock.monotonic()
        self.texts.append(stream.read(now_s, self._context.metrics.gaps).text)
        if stream.ended:
            self._over.set()

    def drop(self, _reason: str) -> None:
        self._dropped = True
        self._over.set()

    async def wait_end(self) -> None:
        await self._over.wait()
        if self._dropped:
            raise DrainingError


class GatewayJobRunner:
    """Runner of jobs whose frames come to this gateway."""

    def __init__(self, context: ResponseContext) -> None:
        self._context = context

    async def run(self, job: Job) -> tuple[StreamReader, str]:
        """Run a job that is ready for a worker; return its ended stream and its text.

        Raises MillraceError if it could not be queued, and DrainingError if this gateway shuts down
        before the end.
        """
        streams = self._context.streams
        client = _JobClient(self._context)
        stream = await self._submit(job, client)
        try:
            await client.wait_end()
            streams.finish(stream)
        finally:
            # No effect if the end was read.
            streams.abort(stream, "cancelled")
        return stream.reader, "".join(client.texts)

    async def generate(self, tenant: str, request_id: str, request: GenerationRequest) -> str:
        """Return the text of a generation of the gateway's own, run as the tenant's batch work.
        Raises MillraceError for any other end.
        """
        context = self._context
        model = await context.models.get(request.model, tenant, request.adapter)
        caller = Caller(tenant=tenant, tier=Tier.BATCH)
        now_ns = context.clock.now_ns()
        deadline_ns = now_ns + round(context.config.request_timeout_s * _NS_PER_S)
        base = replace(
            bare_job(
                request.model,
                caller,
                request_id,
                Tier.BATCH,
                now_ns,
                deadline_ns,
                Api.GATEWAY,
            ),
            session_id=request.session_id,
            reply=context.config.gateway_id,
            batch_frames=True,
            store_result=True,
        )
        job = await context.maker.prepare(with_prompt(base, request), request, model, caller)
        reader, text = await self.run(job)
        assert reader.terminal is not None
        if isinstance(reader.terminal, Done):
            return text
        why = refusal_of_end(reader.terminal).message
        raise InternalGenerationError(f"A generation in the background failed: {why}")

    async def _submit(self, job: Job, client: Client) -> OpenStream:
        """Submit a job; return its accepted stream. Raises MillraceError, and then nothing was
        stored.
        """
        context = self._context
        context.admission.check_open()
        context.admission.check_queue(job.model)
        stream = context.streams.open(job, client, context.clock.monotonic())
        await publish_jobs(context, [job], [stream])
        return stream

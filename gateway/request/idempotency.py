"""One response for one Idempotency-Key, however often the request is sent."""

from __future__ import annotations

from collections.abc import Callable

from millrace.gateway.request.index import RequestIndex
from millrace.gateway.request.response_stream import ResponseContext, ResponseStream
from millrace.gateway.request.resuming import Resuming, UnknownRequestError
from millrace.gateway.request.submitter import Requester, RequestSubmitter
from millrace.registry.requests.generation_request import GenerationRequest

_POLL_S = 0.05
_SUBMITTED_WITHIN_S = 3.0


class Idempotency:
    """The first request with a key is answered, and its result kept; equal ones get that answer
    from its beginning, also while it is still being made: each of them its own copy."""

    def __init__(
        self,
        index: RequestIndex,
        submitter: RequestSubmitter,
        resuming: Resuming,
        context: ResponseContext,
        on_repeat: Callable[[str], None],
    ) -> None:
        """``on_repeat`` is told the model of each answer that is given again."""
        self._index = index
        self._submitter = submitter
        self._resuming = resuming
        self._responses = context.responses
        self._clock = context.clock
        self._on_repeat = on_repeat
        self._submitting: set[str] = set()

    async def submit(
        self,
        request: GenerationRequest,
        requester: Requester,
        new_id: str,
        key: str = "",
        digest: str = "",
    ) -> ResponseStream:
        """The response, new or known; a new one has the request id ``new_id``. ``digest`` tells
        apart requests with one ``key``; a request without a key is always new. Raises
        IdempotencyConflictError for a key of another request, RedisUnreachableError, and what
        ``RequestSubmitter.submit`` raises; the key can be used again then."""
        if not key:
            return await self._submitter.submit(request, requester, new_id)
        tenant = requester.caller.tenant
        awaited_id, give_up_s = "", 0.0
        while True:
            # Asked for each time: whoever has the key may be refused, and give it up.
            known_id = await self._index.claim(tenant, key, digest, new_id)
            now_s = self._clock.monotonic()
            if known_id == new_id:
                break
            if known_id != awaited_id:
                awaited_id, give_up_s = known_id, now_s + _SUBMITTED_WITHIN_S
            try:
                # The response under way or done, if it was accepted so far.
                response = await self._resuming.share(
                    requester.caller, known_id, requester.client, owner=requester.owner
                )
            except UnknownRequestError:
                if now_s >= give_up_s and not self._is_here(known_id):
                    break  # The gateway that claimed the key died.
                await self._clock.sleep(_POLL_S)
                continue
            if requester.trace is not None:
                requester.trace.attach_response(response)
            self._on_repeat(response.request.model)
            return response
        self._submitting.add(known_id)
        try:
            # If who claimed the key died before the queue had the job, it is submitted now under
            # the same id, which the queue takes once.
            return await self._submitter.submit(request, requester, known_id, key)
        except BaseException:
            if self._responses.get(known_id) is None:  # or somebody else has submitted it by now
                await self._index.release(tenant, key, known_id)
            raise
        finally:
            self._submitting.discard(known_id)

    def _is_here(self, request_id: str) -> bool:
        """Whether this gateway submits the request, or has its response."""
        return request_id in self._submitting or self._responses.get(request_id) is not None

    async def release_of_failure(self, response: ResponseStream) -> None:
        """Let the key of a response be tried again if that failed in a way that may pass."""
        refusal = response.refusal
        if refusal is None or refusal.retry_after_s is None or not response.idempotency_key:
            return
        await self._index.release(
            response.caller.tenant, response.idempotency_key, response.request_id
        )

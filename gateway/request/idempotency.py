"""One answer for one Idempotency-Key, however often the request is sent."""

from __future__ import annotations

from gateway.request.index import RequestIndex
from gateway.request.parsing import Ask
from gateway.request.response_stream import Answer
from gateway.request.resuming import Resuming, UnknownRequestError
from gateway.request.submitter import Asker
from gateway.request.tracing import RequestTrace
from gateway.streams.stream import Client
from gateway.tenancy.caller import Caller
from runtime.clock import Clock
from schemas.jobs import Source

_POLL_S = 0.05
_BEGUN_WITHIN_S = 3.0


class Idempotency:
    """The first request with a key is answered, and its result kept; equal ones get that answer
    from its beginning, also while it is still being made: each of them its own copy."""

    def __init__(self, index: RequestIndex, asker: Asker, resuming: Resuming, clock: Clock) -> None:
        self._index = index
        self._asker = asker
        self._resuming = resuming
        self._clock = clock
        self._beginning: set[str] = set()

    async def begin(
        self,
        key: str,
        digest: str,
        ask: Ask,
        caller: Caller,
        request_id: str,
        client: Client,
        *,
        source: Source = Source.HTTP,
        owner: object = None,
        trace: RequestTrace | None = None,
    ) -> Answer:
        """The answer, new or known. Raises IdempotencyConflictError for a key of another request,
        RedisUnreachableError, and what ``Asker.begin`` raises; the key can be used again then."""
        awaited_id, give_up_s = "", 0.0
        while True:
            # Asked for each time: whoever has the key may be refused, and give it up.
            known_id = await self._index.claim(caller.tenant, key, digest, request_id)
            now_s = self._clock.monotonic()
            if known_id == request_id:
                break
            if known_id != awaited_id:
                awaited_id, give_up_s = known_id, now_s + _BEGUN_WITHIN_S
            elif now_s >= give_up_s and known_id not in self._beginning:
                break  # whoever claimed it died
            answer = await self._attach(known_id, caller, client, owner)
            if answer is not None:
                if trace is not None:
                    trace.follow(answer)
                return answer
            await self._clock.sleep(_POLL_S)
        self._beginning.add(known_id)
        try:
            # If who claimed the key died before the queue had the job, it is asked now under the
            # same id, which the queue takes once.
            return await self._asker.begin(
                ask,
                caller,
                known_id,
                source,
                client,
                idempotency_key=key,
                owner=owner,
                trace=trace,
            )
        except BaseException:
            if self._asker.get(known_id) is None:  # or somebody else has begun it by now
                await self._index.release(caller.tenant, key, known_id)
            raise
        finally:
            self._beginning.discard(known_id)

    async def release(self, answer: Answer) -> None:
        """The answer failed in a way that may pass: let the key be tried again."""
        await self._index.release(answer.caller.tenant, answer.idempotency_key, answer.request_id)

    async def _attach(
        self, request_id: str, caller: Caller, client: Client, owner: object
    ) -> Answer | None:
        """The answer under way or done; None if it was not accepted so far."""
        try:
            return await self._resuming.share(caller, request_id, client, owner=owner)
        except UnknownRequestError:
            return None

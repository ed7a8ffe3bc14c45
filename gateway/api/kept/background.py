"""Background answers, computed without a connected client."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import msgspec

from millrace.gateway.api.answers import HttpClient
from millrace.gateway.core import Gateway
from millrace.gateway.errors import DrainingError
from millrace.gateway.rendering.tokens import logprob_infos
from millrace.gateway.request.response_reader import ResponseReader
from millrace.gateway.request.response_stream import ResponseStream
from millrace.gateway.request.resuming import UnknownRequestError
from millrace.gateway.responses.conversations import ConversationStore
from millrace.gateway.responses.renderer import ResponseRenderer
from millrace.gateway.responses.store import (
    ResponseNotFoundError,
    ResponseStore,
    is_background,
    is_over,
)
from millrace.gateway.streams.stream import DetachedClient
from millrace.gateway.tenancy.identity import Caller
from millrace.schemas.control import CancelReason
from millrace.schemas.errors import MillraceError, ModelNotFoundError
from millrace.schemas.responses.items import ResponseAnswer, StoredResponse

_decode = msgspec.json.Decoder(ResponseAnswer).decode


class NotInBackgroundError(MillraceError, code="not_in_background", http_status=400):
    """Request for an operation that only background answers support."""

    def __init__(self, param: str) -> None:
        super().__init__("This needs an answer that was created with background: true.")
        self.param = param


class BackgroundResponses:
    """Background answers and their records.

    The record of an answer says that it is in progress, until the gateway that holds it has read
    its end. If that gateway is gone, the next gateway that gets a request for the answer takes it
    over: the queue has the job, and the worker or the result store has the output.
    """

    def __init__(self, gateway: Gateway, store: ResponseStore) -> None:
        self._gateway = gateway
        self._store = store
        self._conversations = ConversationStore(gateway.redis, gateway.config)

    async def begin(
        self, render: Callable[[ResponseReader], ResponseRenderer], response: ResponseStream
    ) -> bytes:
        """Continue an accepted response without its client; return the initial body.

        Raises RedisUnreachableError after cancelling the response.
        """
        renderer = render(response)
        tenant, queued = response.caller.tenant, renderer.queued()
        try:
            await self._store.begin(
                tenant, queued, renderer.conversation, renderer.request, renderer.num_earlier
            )
        except BaseException:
            response.abort("failed")
            raise
        response.detach(None, "", renderer)
        stored = await self.look(response.caller, response.request_id)
        return msgspec.json.encode(queued) if stored is None else bytes(stored.response)

    async def look(self, caller: Caller, response_id: str) -> StoredResponse | None:
        """Return the stored state of an answer; None if there is none. Take over an answer without
        a holder.

        Raises RedisUnreachableError.
        """
        stored = await self._store.get(caller.tenant, response_id)
        if stored is None or not is_background(stored) or is_over(stored):
            return stored
        client = DetachedClient(lambda: None)
        try:
            adopted = await self._gateway.resuming.adopt(caller, response_id, client)
        except UnknownRequestError:
            return None  # expired: older than all records of requests
        except ModelNotFoundError:
            return stored  # cannot be continued here
        if adopted is not None:
            adopted.detach(None, "", self.renderer(stored, adopted))
        if not await self._has_begun(response_id):
            return stored
        response = msgspec.structs.replace(_decode(stored.response), status="in_progress")
        encoded = msgspec.Raw(msgspec.json.encode(response))
        return msgspec.structs.replace(stored, response=encoded)

    async def cancel(self, caller: Caller, response_id: str) -> StoredResponse:
        """Cancel an answer and return its stored state then. A finished answer stays unchanged.

        Raises ResponseNotFoundError, NotInBackgroundError and RedisUnreachableError.
        """
        stored = await self._store.get(caller.tenant, response_id)
        if stored is None:
            raise ResponseNotFoundError(response_id)
        if not is_background(stored):
            raise NotInBackgroundError("response_id")
        if not is_over(stored):
            await self._cancel(caller, response_id, stored)
            stored = await self._store.get(caller.tenant, response_id)
        if stored is None:
            raise ResponseNotFoundError(response_id)
        return stored

    def renderer(
        self, stored: StoredResponse, response: ResponseReader, after: int = -1
    ) -> ResponseRenderer:
        """Return a renderer of a background answer that emits the events ``after`` a sequence
        number.
        """
        assert stored.request is not None
        describe = partial(logprob_infos, response.model.tokenizer)
        earlier, given = stored.input[: stored.num_earlier], stored.input[stored.num_earlier :]
        return ResponseRenderer(
            stored.request,
            response,
            earlier,
            given,
            self._store,
            describe,
            after,
            conversations=self._conversations,
        )

    async def _cancel(self, caller: Caller, response_id: str, stored: StoredResponse) -> None:
        client = HttpClient(2**62, lambda: None)
        try:
            response = await self._gateway.resuming.share(caller, response_id, client)
        except UnknownRequestError:
            raise ResponseNotFoundError(response_id) from None
        try:
            renderer = self.renderer(stored, response)
            response.cancel(CancelReason.CLIENT)
            while True:
                for part in response.read_parts(self._gateway.clock.monotonic()):
                    renderer.add(part)
                if response.ended:
                    break
                await client.wait()
                if client.going_away:
                    raise DrainingError
            if not response.was_handed_off:
                await renderer.keep()
            response.finish()
        finally:
            response.abort("cancelled")  # nothing to do if its end was read

    async def _has_begun(self, response_id: str) -> bool:
        """Return whether a worker has started the response."""
        response = self._gateway.responses.get(response_id)
        if response is not None and response.has_begun:
            return True
        index = self._gateway.generations
        running = None if index is None else await index.lookup(response_id)
        return running is not None and bool(running.worker_id)

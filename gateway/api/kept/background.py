"""Answers that are made whether or not anybody waits for them."""

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
    """What goes only with an answer in the background was asked of another one."""

    def __init__(self, param: str) -> None:
        super().__init__("Only an answer that was asked for with background: true can do that.")
        self.param = param


class BackgroundResponses:
    """The answer's record says that it is on its way, until the gateway that holds it has read its
    end. If that gateway is gone, the next one that is asked holds it: the queue has the job, and
    the worker or the store of results what came of it."""

    def __init__(self, gateway: Gateway, store: ResponseStore) -> None:
        self._gateway = gateway
        self._store = store
        self._conversations = ConversationStore(gateway.redis, gateway.config)

    async def begin(
        self, render: Callable[[ResponseReader], ResponseRenderer], response: ResponseStream
    ) -> bytes:
        """Have a response that was accepted go on without its client; what it is so far. Raises
        RedisUnreachableError: it is cancelled then."""
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
        """What is kept of an answer now; None if nothing is. Has one that nobody holds any more go
        on here. Raises RedisUnreachableError."""
        stored = await self._store.get(caller.tenant, response_id)
        if stored is None or not is_background(stored) or is_over(stored):
            return stored
        client = DetachedClient(lambda: None)
        try:
            adopted = await self._gateway.resuming.adopt(caller, response_id, client)
        except UnknownRequestError:
            return None  # older than what is known of any request
        except ModelNotFoundError:
            return stored  # nothing more of it can be read here
        if adopted is not None:
            adopted.detach(None, "", self.renderer(stored, adopted))
        if not await self._has_begun(response_id):
            return stored
        response = msgspec.structs.replace(_decode(stored.response), status="in_progress")
        encoded = msgspec.Raw(msgspec.json.encode(response))
        return msgspec.structs.replace(stored, response=encoded)

    async def cancel(self, caller: Caller, response_id: str) -> StoredResponse:
        """Have an answer end; what is kept of it then. One that has ended stays as it is. Raises
        ResponseNotFoundError, NotInBackgroundError and RedisUnreachableError."""
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
        """Of an answer in the background; gives out the events ``after`` a sequence number."""
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
        """Whether a worker has it, or had."""
        response = self._gateway.responses.get(response_id)
        if response is not None and response.has_begun:
            return True
        index = self._gateway.generations
        running = None if index is None else await index.lookup(response_id)
        return running is not None and bool(running.worker_id)

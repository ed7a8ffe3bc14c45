"""Stored answers in Redis, which later requests continue."""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec

from millrace.bus import redis_keys
from millrace.runtime.redis.link import RedisLink, reachable
from millrace.runtime.redis.wire import Argument
from millrace.runtime.retry import retry
from millrace.runtime.tasks import in_thread_if
from millrace.schemas.config import GatewayConfig
from millrace.schemas.errors import MillraceError, PayloadTooLargeError
from millrace.schemas.jobs import MAX_NAME_CHARACTERS
from millrace.schemas.responses.items import (
    Item,
    ResponseAnswer,
    ResponsesRequest,
    ResponseStatus,
    StoredResponse,
)

_log = logging.getLogger(__name__)

_T = TypeVar("_T")

# Speed matters more than size: text shrinks to a third anyway.
_COMPRESSION = 1
MAX_INLINE_BYTES = 65_536
# The link retries a second after a failure.
_DELAYS_S = (0.5, 0.5, 0.5)


class ResponseNotFoundError(MillraceError, code="response_not_found", http_status=404):
    """Response id that is unknown for this tenant."""

    def __init__(self, response_id: str) -> None:
        super().__init__(
            f"There is no response {response_id!r:.100}: it still runs, was not stored or expired."
        )


class PreviousResponseNotFoundError(
    MillraceError, code="previous_response_not_found", http_status=400
):
    """Request that continues an answer which is not stored (any more) for this tenant."""

    param = "previous_response_id"

    def __init__(self, response_id: str) -> None:
        super().__init__(
            f"There is no response {response_id!r:.100} to continue: it still runs, was not stored "
            "or expired. Send the whole conversation as input."
        )


class _Output(msgspec.Struct, frozen=True):
    model: str
    output: tuple[Item, ...]
    status: ResponseStatus
    background: bool = False


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(StoredResponse)
_output_decoder = msgspec.json.Decoder(_Output)


def conversation_of(stored: StoredResponse) -> tuple[Item, ...]:
    """Return all items up to the end of an answer."""
    return (*stored.input, *_output_decoder.decode(stored.response).output)


def model_of(stored: StoredResponse) -> str:
    """Return the model of the answer."""
    return _output_decoder.decode(stored.response).model


def is_over(stored: StoredResponse) -> bool:
    """Return whether the answer has ended, successful or not."""
    return _output_decoder.decode(stored.response).status not in ("queued", "in_progress")


def is_background(stored: StoredResponse) -> bool:
    """Return whether it was requested with ``background``."""
    return stored.request is not None


class ResponseStore:
    """Store of each tenant's answers, kept for ``response_ttl_s`` each. Without a link, Redis
    counts as unreachable.
    """

    def __init__(self, link: RedisLink | None, config: GatewayConfig) -> None:
        self._link = link
        self._ttl_s = round(config.response_ttl_s)
        self._max_bytes = config.response_max_bytes

    async def check(self, items: tuple[Item, ...]) -> None:
        """Raise PayloadTooLargeError for a conversation that is too large to be stored, and
        RedisUnreachableError.
        """
        num_bytes = len(_encoder.encode(items))
        if num_bytes > self._max_bytes:
            raise PayloadTooLargeError(num_bytes, self._max_bytes)
        await self._insist("PING")

    async def put(self, tenant: str, response: ResponseAnswer, items: tuple[Item, ...]) -> None:
        """Store an answer and the items before it, unless it is stored already: a second reader of
        its end may know of later items. Raises RedisUnreachableError.
        """
        packed = await _pack(response, items, None)
        key = redis_keys.response_key(tenant, response.id)
        await self._insist("SET", key, packed, "NX", "EX", self._ttl_s)

    async def begin(
        self,
        tenant: str,
        response: ResponseAnswer,
        items: tuple[Item, ...],
        request: ResponsesRequest,
        num_earlier: int,
    ) -> None:
        """Store a background answer before it is made, unless it is stored already. Raises
        RedisUnreachableError.
        """
        packed = await _pack(response, items, request, num_earlier)
        key = redis_keys.response_key(tenant, response.id)
        await self._insist("SET", key, packed, "NX", "EX", self._ttl_s)

    async def end(
        self,
        tenant: str,
        response: ResponseAnswer,
        items: tuple[Item, ...],
        request: ResponsesRequest,
    ) -> None:
        """Store the end of a background answer, unless the answer was deleted or another end is
        stored. Raises RedisUnreachableError.
        """
        stored = await self.get(tenant, response.id)
        if stored is None or is_over(stored):
            return
        packed = await _pack(response, items, request)
        key = redis_keys.response_key(tenant, response.id)
        await self._insist("SET", key, packed, "XX", "EX", self._ttl_s)

    async def get(self, tenant: str, response_id: str) -> StoredResponse | None:
        """Return a stored answer; None if there is no readable one. Raises
        RedisUnreachableError.
        """
        link = reachable(self._link)
        if len(response_id) > MAX_NAME_CHARACTERS:
            return None
        packed = await link.call("GET", redis_keys.response_key(tenant, response_id))
        if packed is None:
            return None
        return await in_thread_if(len(packed) > MAX_INLINE_BYTES, lambda: _unpack(packed))

    async def delete(self, tenant: str, response_id: str) -> bool:
        """Delete an answer; return whether it existed. Raises RedisUnreachableError."""
        link = reachable(self._link)
        if len(response_id) > MAX_NAME_CHARACTERS:
            return False
        return bool(await link.call("DEL", redis_keys.response_key(tenant, response_id)))

    async def _insist(self, *command: Argument) -> None:
        link = reachable(self._link)
        await insist(lambda: link.call(*command))


async def insist(call: Callable[[], Awaitable[_T]]) -> _T:
    """Retry a call during a short outage of Redis: a conversation that is not stored cannot be
    continued.
    """
    return await retry(call, _DELAYS_S, asyncio.sleep)


async def _pack(
    response: ResponseAnswer,
    items: tuple[Item, ...],
    request: ResponsesRequest | None,
    num_earlier: int = 0,
) -> bytes:
    body = msgspec.Raw(_encoder.encode(response))
    if request is not None:
        request = msgspec.structs.replace(request, input="")
    plain = _encoder.encode(
        StoredResponse(response=body, input=items, request=request, num_earlier=num_earlier)
    )
    return await in_thread_if(
        len(plain) > MAX_INLINE_BYTES, lambda: zlib.compress(plain, _COMPRESSION)
    )


def _unpack(packed: bytes) -> StoredResponse | None:
    """Decode a stored answer; None if another version of this program stored it in its own
    format.
    """
    try:
        stored = _decoder.decode(zlib.decompress(packed))
        _output_decoder.decode(stored.response)
    except (zlib.error, msgspec.MsgspecError) as error:
        _log.warning("a kept answer cannot be read", extra={"cause": type(error).__name__})
        return None
    return stored

"""What is kept of answers of the Responses API, and what is told of that."""

from __future__ import annotations

from typing import Literal

import msgspec

from millrace.schemas.responses.items import Item, ResponsesRequest


class ResponseDeleted(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


class InputTokens(msgspec.Struct, frozen=True, kw_only=True):
    """``POST /v1/responses/input_tokens``."""

    input_tokens: int
    object: Literal["response.input_tokens"] = "response.input_tokens"


class ItemList(msgspec.Struct, frozen=True, kw_only=True):
    """``GET /v1/responses/{id}/input_items``."""

    data: tuple[Item, ...]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"


class StoredResponse(msgspec.Struct, frozen=True, kw_only=True):
    """What is kept of an answer: the ``response`` as it was sent, and all the items before it; of
    one in the background also the ``request``, without its input, and how many of the items are not
    of that (``num_earlier``)."""

    response: msgspec.Raw
    input: tuple[Item, ...]
    request: ResponsesRequest | None = None
    num_earlier: int = 0

"""Endpoint ``/v1/conversations``: conversations to which answers of the Responses API are added."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from millrace.gateway.api.rest import (
    RestApi,
    check_items_query,
    check_query,
    items_page,
    list_response,
    place_of,
)
from millrace.gateway.core import Gateway
from millrace.gateway.responses.conversations import ConversationNotFoundError, ConversationStore
from millrace.gateway.responses.input import given_items
from millrace.gateway.responses.normalised import named
from millrace.gateway.responses.references import ItemNotFoundError, resolve
from millrace.gateway.responses.store import ResponseStore
from millrace.gateway.tenancy.identity import Caller
from millrace.gateway.transport.http import json_response, new_request_id
from millrace.registry.requests.message_fields import check_metadata
from millrace.schemas.chat.chats import (
    Conversation,
    ConversationDeleted,
    ConversationRequest,
    ConversationUpdate,
    NewItems,
)
from millrace.schemas.errors import ParameterError
from millrace.schemas.notices import NOTICE_NAME, NoticeCode, Notices, bounded, header_value
from millrace.schemas.responses.items import Item, ItemList

MAX_NEW_ITEMS = 20
_NS_PER_S = 1_000_000_000


class ConversationsApi(RestApi):
    """Conversation endpoints of one gateway; each tenant sees its own conversations."""

    def __init__(self, gateway: Gateway) -> None:
        super().__init__(gateway)
        self._store = ConversationStore(gateway.redis, gateway.config)
        self._responses = ResponseStore(gateway.redis, gateway.config)

    def routes(self) -> list[Route]:
        one = "/v1/conversations/{conversation_id}"
        return [
            Route("/v1/conversations", self.create, methods=["POST"]),
            Route(one, self.conversation, methods=["GET"]),
            Route(one, self.update, methods=["POST"]),
            Route(one, self.delete, methods=["DELETE"]),
            Route(f"{one}/items", self.items, methods=["GET"]),
            Route(f"{one}/items", self.add_items, methods=["POST"]),
            Route(f"{one}/items/{{item_id}}", self.item, methods=["GET"]),
            Route(f"{one}/items/{{item_id}}", self.delete_item, methods=["DELETE"]),
        ]

    async def create(self, request: Request) -> Response:
        """Create a conversation with the given items."""
        caller = await self._caller(request)
        asked = await self._read(request, ConversationRequest)
        check_metadata(asked.metadata)
        items, notices = await self._given(asked.items or (), (), caller)
        head = Conversation(
            id=new_request_id("conv"),
            created_at=self._gateway.clock.now_ns() // _NS_PER_S,
            metadata=asked.metadata or {},
        )
        await self._store.create(caller.tenant, head)
        if items:
            await self._store.append(caller.tenant, head.id, items)
        return _with_notices(json_response(head), notices)

    async def conversation(self, request: Request) -> Response:
        caller = await self._caller(request)
        kept = await self._store.get(caller.tenant, request.path_params["conversation_id"])
        return json_response(kept.head)

    async def update(self, request: Request) -> Response:
        """Replace the metadata of a conversation."""
        caller = await self._caller(request)
        asked = await self._read(request, ConversationUpdate)
        check_metadata(asked.metadata)
        kept = await self._store.get(caller.tenant, request.path_params["conversation_id"])
        head = msgspec.structs.replace(kept.head, metadata=asked.metadata or {})
        await self._store.update(caller.tenant, head)
        return json_response(head)

    async def delete(self, request: Request) -> Response:
        """Delete a conversation with its items. Answers in progress are added to no
        conversation.
        """
        caller = await self._caller(request)
        conversation_id = request.path_params["conversation_id"]
        if not await self._store.delete(caller.tenant, conversation_id):
            raise ConversationNotFoundError(conversation_id)
        return json_response(ConversationDeleted(id=conversation_id))

    async def items(self, request: Request) -> Response:
        """Return the items of a conversation in pages."""
        check_items_query(request)
        caller = await self._caller(request)
        kept = await self._store.get(caller.tenant, request.path_params["conversation_id"])
        return items_page(request, kept.items)

    async def add_items(self, request: Request) -> Response:
        """Append items to a conversation."""
        check_query(request, ())
        caller = await self._caller(request)
        asked = await self._read(request, NewItems)
        if not asked.items:
            raise ParameterError("items", "items must hold at least one item.")
        conversation_id = request.path_params["conversation_id"]
        kept = await self._store.get(caller.tenant, conversation_id)
        items, notices = await self._given(asked.items, kept.items, caller)
        await self._store.append(caller.tenant, conversation_id, items)
        return _with_notices(list_response(ItemList, items, has_more=False), notices)

    async def item(self, request: Request) -> Response:
        check_query(request, ())
        caller = await self._caller(request)
        kept = await self._store.get(caller.tenant, request.path_params["conversation_id"])
        return json_response(kept.items[_place(request, kept.items)])

    async def delete_item(self, request: Request) -> Response:
        """Delete one item; return the conversation without it."""
        caller = await self._caller(request)
        conversation_id = request.path_params["conversation_id"]
        kept = await self._store.get(caller.tenant, conversation_id)
        field = kept.fields[_place(request, kept.items)]
        await self._store.delete_item(caller.tenant, conversation_id, field)
        return json_response(kept.head)

    async def _given(
        self, raw: Sequence[msgspec.Raw], earlier: tuple[Item, ...], caller: Caller
    ) -> tuple[tuple[Item, ...], Notices]:
        """Return the items to add to ``earlier``, each with a new id, and notices of content that
        is not stored.
        """
        if len(raw) > MAX_NEW_ITEMS:
            raise ParameterError(
                "items", f"items takes at most {MAX_NEW_ITEMS} at a time, got {len(raw)}."
            )
        if not raw:
            return (), ()
        said = given_items(raw, "items")
        for left_out in said.notices:
            if left_out.code is not NoticeCode.ITEM_LEFT_OUT:
                continue
            raise ParameterError(
                left_out.param,
                f"{left_out.param}: items of type {left_out.detail} are not supported; leave it "
                "out.",
            )
        given = await resolve(said, earlier, caller.tenant, self._responses, "items")
        items = named(given, secrets.token_hex(12), earlier)
        self._store.check_room((*earlier, *items))
        return items, bounded(said.notices)


def _with_notices(response: Response, notices: Notices) -> Response:
    if notices:
        response.headers[NOTICE_NAME] = header_value(notices).decode()
    return response


def _place(request: Request, items: Sequence[Item]) -> int:
    item_id: str = request.path_params["item_id"]
    place = place_of(items, item_id)
    if place is None:
        raise ItemNotFoundError("item_id", item_id)
    return place

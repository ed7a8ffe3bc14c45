"""What the endpoints on Starlette share: callers, bodies, and lists in pages."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Callable, Hashable, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple, TypeVar, cast

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from millrace.gateway.core import Gateway
from millrace.gateway.responses.input import INCLUDABLE
from millrace.gateway.tenancy.identity import Caller, require_admin
from millrace.gateway.transport.http import json_response, new_request_id, read_body
from millrace.registry.requests.decoding import decode
from millrace.schemas.errors import ParameterError
from millrace.schemas.responses.items import Item, ItemList

_MAX_PAGE_ITEMS = 100
_PAGE_ITEMS = 20


_T = TypeVar("_T")


@functools.cache
def _decoder_of(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


def decode_as(kind: type[_T], body: bytes) -> _T:
    """Decode a body. Raises MillraceError that names the field at fault."""
    decoded: _T = decode(_decoder_of(cast("Hashable", kind)), body)
    return decoded


class RestApi:
    """Starlette endpoints over one gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def _caller(self, request: Request) -> Caller:
        """Return whose request it is. Raises as ``Identity.caller`` does."""
        return await self._gateway.identity.caller(request.scope)

    async def _admin(self, request: Request) -> None:
        """Raises InsufficientPermissionsError unless an administrator asks."""
        require_admin(await self._caller(request))

    async def _read(self, request: Request, kind: type[_T]) -> _T:
        """Decode the body. Raises as ``read_body`` and ``decode`` do."""
        return decode_as(
            kind, await read_body(request.scope, request.receive, self._gateway.config)
        )

    @asynccontextmanager
    async def _counted_body(self, request: Request) -> AsyncIterator[tuple[Caller, bytes]]:
        """Yield the caller and the body; what is done within counts as a request of theirs."""
        caller = await self._caller(request)
        body = await read_body(request.scope, request.receive, self._gateway.config)
        async with self._gateway.admission.counts(caller, new_request_id("tok"), len(body)):
            yield caller, body


class Page(NamedTuple):
    """The ids of one page, and whether there are more behind it."""

    ids: list[str]
    has_more: bool


def page_of(
    request: Request,
    ids: Sequence[str],
    *,
    default: int,
    most: int,
    more_fields: Sequence[str] = (),
) -> Page:
    """The page of ``ids``, which grow with time, that the query asks for, newest first unless told.

    ``limit`` is 1 to ``most``; ``after`` is the last id of the page before; ``order``, if it is
    among ``more_fields``, is asc or desc. Raises ParameterError, also for a field that the list
    does not have.
    """
    query = request.query_params
    refuse_other_fields(request, ("limit", "after", *more_fields))
    limit = limit_of(request, default, most)
    after = query.get("after", "")
    if is_ascending(request):
        left = [one for one in ids if one > after]
    else:
        left = [one for one in reversed(ids) if not after or one < after]
    return Page(left[:limit], len(left) > limit)


def refuse_other_fields(request: Request, known: Sequence[str]) -> None:
    """Raises ParameterError for a field of the query that is not ``known``."""
    for name in request.query_params:
        if name not in known:
            raise ParameterError(name, f"{name} is not a field of this request; leave it out.")


def place_of(entries: Sequence[Any], wanted: str) -> int | None:
    """Return the index of the entry with the id ``wanted``; None: there is none."""
    return next((i for i, entry in enumerate(entries) if entry.id == wanted), None)


def is_ascending(request: Request) -> bool:
    """Raises ParameterError for an ``order`` that is none."""
    order = request.query_params.get("order", "desc")
    if order not in ("asc", "desc"):
        raise ParameterError("order", "order must be asc or desc.")
    return order == "asc"


def limit_of(request: Request, default: int, most: int) -> int:
    """How many entries a page may have. Raises ParameterError."""
    text = request.query_params.get("limit")
    if text is None:
        return default
    if not (text.isascii() and text.isdigit()) or not 1 <= int(text[:9]) <= most or len(text) > 9:
        raise ParameterError("limit", f"limit must be a number from 1 to {most}.")
    return int(text)


def list_response(kind: Callable[..., object], entries: Sequence[Any], has_more: bool) -> Response:
    """A page as a list of that kind, which names its first and last entry."""
    return json_response(
        kind(
            data=tuple(entries),
            first_id=entries[0].id if entries else None,
            last_id=entries[-1].id if entries else None,
            has_more=has_more,
        )
    )


def check_query(request: Request, known: Sequence[str]) -> None:
    """Raises ParameterError for other fields than ``known``. ``include`` changes nothing: what
    there is, is always there."""
    for name, value in request.query_params.multi_items():
        if name in ("include", "include[]") and value in INCLUDABLE:
            continue
        if name not in known:
            raise ParameterError(name, f"{name} is not supported here; leave it out.")


def check_items_query(request: Request) -> None:
    """Raises ParameterError for other fields than ``items_page`` knows."""
    check_query(request, ("after", "limit", "order"))


def items_page(request: Request, items: tuple[Item, ...]) -> Response:
    """The page that the query asks for, the newest item first unless told.

    Raises ParameterError.
    """
    items = items if is_ascending(request) else items[::-1]
    after = request.query_params.get("after")
    if after is not None:
        place = place_of(items, after)
        if place is None:
            raise ParameterError("after", "after must be the id of an item of this list.")
        items = items[place + 1 :]
    page = items[: limit_of(request, _PAGE_ITEMS, _MAX_PAGE_ITEMS)]
    return list_response(ItemList, page, len(items) > len(page))

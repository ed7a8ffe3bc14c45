"""Shared parts of the Starlette endpoints: callers, bodies, and lists in pages."""

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
    """Decode a body. Raises MillraceError that names the invalid field."""
    decoded: _T = decode(_decoder_of(cast("Hashable", kind)), body)
    return decoded


class RestApi:
    """Starlette endpoints over one gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def _caller(self, request: Request) -> Caller:
        """Return the caller of a request. Raises as ``Identity.caller`` does."""
        return await self._gateway.identity.caller(request.scope)

    async def _admin(self, request: Request) -> None:
        """Raise InsufficientPermissionsError unless the caller is an administrator."""
        require_admin(await self._caller(request))

    async def _read(self, request: Request, kind: type[_T]) -> _T:
        """Decode the body. Raises as ``read_body`` and ``decode`` do."""
        return decode_as(
            kind, await read_body(request.scope, request.receive, self._gateway.config)
        )

    @asynccontextmanager
    async def _counted_body(self, request: Request) -> AsyncIterator[tuple[Caller, bytes]]:
        """Yield the caller and the body. The work within this context counts as a request of the
        caller.
        """
        caller = await self._caller(request)
        body = await read_body(request.scope, request.receive, self._gateway.config)
        async with self._gateway.admission.counts(caller, new_request_id("tok"), len(body)):
            yield caller, body


class Page(NamedTuple):
    """Ids of one page; ``has_more`` is true if more ids follow."""

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
    """Return the page of ``ids`` that the query selects, newest first by default. The ids grow with
    time.

    ``limit`` is 1 to ``most``; ``after`` is the last id of the previous page; ``order``, if it is
    among ``more_fields``, is asc or desc. Raises ParameterError, also for an unknown field.
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
    """Raise ParameterError for a query field that is not ``known``."""
    for name in request.query_params:
        if name not in known:
            raise ParameterError(name, f"{name} is not a field of this request; leave it out.")


def place_of(entries: Sequence[Any], wanted: str) -> int | None:
    """Return the index of the entry with the id ``wanted``; None if there is none."""
    return next((i for i, entry in enumerate(entries) if entry.id == wanted), None)


def is_ascending(request: Request) -> bool:
    """Return whether ``order`` is ascending. Raises ParameterError for an invalid ``order``."""
    order = request.query_params.get("order", "desc")
    if order not in ("asc", "desc"):
        raise ParameterError("order", "order must be asc or desc.")
    return order == "asc"


def limit_of(request: Request, default: int, most: int) -> int:
    """Return the maximum number of entries of a page. Raises ParameterError."""
    text = request.query_params.get("limit")
    if text is None:
        return default
    if not (text.isascii() and text.isdigit()) or not 1 <= int(text[:9]) <= most or len(text) > 9:
        raise ParameterError("limit", f"limit must be a number from 1 to {most}.")
    return int(text)


def list_response(kind: Callable[..., object], entries: Sequence[Any], has_more: bool) -> Response:
    """Return a page as a list of that kind, which names its first and last entry."""
    return json_response(
        kind(
            data=tuple(entries),
            first_id=entries[0].id if entries else None,
            last_id=entries[-1].id if entries else None,
            has_more=has_more,
        )
    )


def check_query(request: Request, known: Sequence[str]) -> None:
    """Raise ParameterError for query fields other than ``known``. ``include`` is accepted and has
    no effect: everything is always included.
    """
    for name, value in request.query_params.multi_items():
        if name in ("include", "include[]") and value in INCLUDABLE:
            continue
        if name not in known:
            raise ParameterError(name, f"{name} is not supported here; leave it out.")


def check_items_query(request: Request) -> None:
    """Raise ParameterError for query fields unknown to ``items_page``."""
    check_query(request, ("after", "limit", "order"))


def items_page(request: Request, items: tuple[Item, ...]) -> Response:
    """Return the page of items that the query selects, newest first by default. Raises
    ParameterError.
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

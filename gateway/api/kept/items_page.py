"""Lists of a conversation's items, in pages."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response

from millrace.gateway.api.paging import is_ascending, limit_of, list_response
from millrace.gateway.responses.input import INCLUDABLE
from millrace.schemas.errors import ParameterError
from millrace.schemas.responses.items import Item, ItemList

_MAX_PAGE_ITEMS = 100
_PAGE_ITEMS = 20


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
        items = _behind(items, after)
    page = items[: limit_of(request, _PAGE_ITEMS, _MAX_PAGE_ITEMS)]
    return list_response(ItemList, page, len(items) > len(page))


def _behind(items: tuple[Item, ...], after: str) -> tuple[Item, ...]:
    for number, item in enumerate(items):
        if item.id == after:
            return items[number + 1 :]
    raise ParameterError("after", "after must be the id of an item of this list.")

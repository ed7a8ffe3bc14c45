"""Lists in pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from millrace.gateway.transport.http import json_response
from millrace.schemas.errors import ParameterError


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
    for name in query:
        if name not in ("limit", "after", *more_fields):
            raise ParameterError(name, f"{name} is not a field of this request; leave it out.")
    limit = limit_of(request, default, most)
    after = query.get("after", "")
    if is_ascending(request):
        left = [one for one in ids if one > after]
    else:
        left = [one for one in reversed(ids) if not after or one < after]
    return Page(left[:limit], len(left) > limit)


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

"""Lists in pages, by ids that grow with time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from starlette.requests import Request

from schemas.errors import ParameterError


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
    """The page of ``ids``, which are sorted, that the query asks for, newest first unless told.

    ``limit`` is 1 to ``most``; ``after`` is the last id of the page before; ``order``, if it is
    among ``more_fields``, is asc or desc. Raises ParameterError, also for a field that the list
    does not have.
    """
    query = request.query_params
    for name in query:
        if name not in ("limit", "after", *more_fields):
            raise ParameterError(name, f"{name} is not a field of this request; leave it out.")
    limit = _limit(query.get("limit"), default, most)
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise ParameterError("order", "order must be asc or desc.")
    after = query.get("after", "")
    if order == "asc":
        left = [one for one in ids if one > after]
    else:
        left = [one for one in reversed(ids) if not after or one < after]
    return Page(left[:limit], len(left) > limit)


def _limit(text: str | None, default: int, most: int) -> int:
    if text is None:
        return default
    if not (text.isascii() and text.isdigit()) or not 1 <= int(text[:9]) <= most or len(text) > 9:
        raise ParameterError("limit", f"limit must be a number from 1 to {most}.")
    return int(text)

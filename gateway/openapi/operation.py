"""Description of one method of one path, and shared shapes."""

from __future__ import annotations

import re
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any

from millrace.schemas.json_schema import Schema
from millrace.schemas.openai import ErrorBody

JSON = "application/json"


@dataclass(frozen=True)
class Query:
    """Field of a query string."""

    name: str
    schema: Schema
    description: str


@dataclass(frozen=True)
class Media:
    """Body other than one JSON value of a type in ``schemas/``."""

    type: str
    schema: Schema


TEXT = Media("text/plain", {"type": "string"})


@dataclass(frozen=True)
class Operation:
    """Description of one method of one path.

    ``answer`` and ``body`` are types of ``schemas/``; ``event`` is the type of each event of a
    streamed answer. ``own_errors`` are HTTP statuses beyond those of ``errors``. ``refused`` is the
    type of an error's body. ``is_open``: the path needs no key.
    """

    method: str
    path: str
    name: str
    summary: str
    answer: Any
    _: KW_ONLY
    body: Any = None
    example: Any = None
    event: Any = None
    query: tuple[Query, ...] = ()
    own_errors: tuple[int, ...] = ()
    description: str = ""
    is_open: bool = False
    refused: Any = ErrorBody

    @property
    def is_generation(self) -> bool:
        return self.event is not None and self.method == "post"

    @property
    def path_parameters(self) -> list[str]:
        return re.findall(r"\{(\w+)\}", self.path)

    @property
    def errors(self) -> list[int]:
        """Return the HTTP statuses beside 200, ascending."""
        statuses = set(self.own_errors)
        if self.query:
            statuses.add(400)
        if self.path_parameters:
            statuses.add(404)
        if self.body is not None:
            statuses |= {400, 408, 413} | ({415} if not isinstance(self.body, Media) else set())
        if not self.is_open:
            statuses |= {401, 403, 503}
        return sorted(statuses)


def page(most: int, *more: Query) -> tuple[Query, ...]:
    limit = {"type": "integer", "minimum": 1, "maximum": most}
    return (
        Query("limit", limit, "Maximum number of entries."),
        Query("after", {"type": "string"}, "The id of the last entry of the previous page."),
        *more,
    )


get, post, delete = (partial(Operation, method) for method in ("get", "post", "delete"))
generate = partial(post, own_errors=(404, 409, 429, 500, 504))
_order = {"title": "Order", "enum": ["asc", "desc"], "default": "desc"}
ORDER = Query("order", _order, "asc: the oldest first; desc: the newest first.")

"""One method of one path, as the OpenAPI document tells of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Schema = dict[str, Any]

JSON = "application/json"


@dataclass(frozen=True, kw_only=True)
class Query:
    """A field of a query string."""

    name: str
    schema: Schema
    description: str


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One method of one path.

    ``body`` and ``answer`` are types of ``schemas/`` or, where there is none, a JSON Schema;
    ``event`` is what each event of a streamed answer holds. ``errors`` are the HTTP statuses beside
    200 that are its own: those of every operation that tells callers apart come on top
    (``is_open``: this one does not).
    """

    method: str
    path: str
    name: str
    tag: str
    summary: str
    description: str = ""
    query: tuple[Query, ...] = ()
    body: Any = None
    body_type: str = JSON
    example: Any = None
    answer: Any = None
    answer_type: str = JSON
    event: Any = None
    errors: tuple[int, ...] = ()
    is_open: bool = False

    @property
    def is_generation(self) -> bool:
        return self.event is not None

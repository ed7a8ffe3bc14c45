"""How an endpoint that answers with generations takes its body and shapes its answer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import msgspec

from gateway.caller import Caller
from gateway.errors import Refusal
from gateway.parsing import Ask
from gateway.parts import Part

if TYPE_CHECKING:
    from gateway.answer import Answer


class Renderer(Protocol):
    """The bytes of one answer. A streamed one is ``first``, ``part`` for each of its parts and then
    ``last`` or ``failed``; another one gets its parts by ``add`` and is ``whole`` at the end.

    ``plain``, if there is one, goes before and after the JSON of a text to make the event of a part
    of the only choice that has nothing but text.
    """

    plain: tuple[bytes, bytes] | None

    def first(self) -> bytes:
        """Events before any part; may be empty."""

    def part(self, part: Part) -> bytes:
        """The events of a part; may be empty."""

    def last(self) -> bytes:
        """Events after the last part of an answer that ended well."""

    def failed(self, refusal: Refusal) -> bytes:
        """Events after the last part of an answer that failed on the way."""

    def add(self, part: Part) -> None: ...

    def whole(self) -> bytes:
        """The body of an answer that ended well."""

    async def store(self) -> None:
        """Keep what a later request may refer to; called once at a good end, before ``last`` and
        ``whole`` are sent."""


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """A body that was understood. ``render`` is called once the answer is accepted."""

    ask: Ask
    stream: bool
    render: Callable[[Answer], Renderer]


class Endpoint(ABC):
    """One path of the token path: ``POST route``."""

    route: str
    id_prefix: str

    @abstractmethod
    async def prepare(self, body: bytes, caller: Caller) -> Prepared:
        """Raises MillraceError for a body that cannot be honoured."""

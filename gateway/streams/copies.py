"""Streams that are read beside the stream of their job, each for a client of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from millrace.gateway.streams.stream import OpenStream


class StreamCopies:
    """By the ids of their jobs. A copy is here as long as its client may take something."""

    def __init__(self) -> None:
        self._copies: dict[str, list[OpenStream]] = {}

    def __bool__(self) -> bool:
        return bool(self._copies)

    def __iter__(self) -> Iterator[OpenStream]:
        for copies in self._copies.values():
            yield from copies

    def of(self, request_id: str) -> Sequence[OpenStream]:
        """A snapshot: feeding one may remove it."""
        # Most gateways have none at most times, and this is asked for each frame.
        return list(self._copies.get(request_id, ())) if self._copies else ()

    def add(self, stream: OpenStream) -> None:
        stream.is_copy = True
        self._copies.setdefault(stream.request_id, []).append(stream)

    def remove(self, stream: OpenStream) -> bool:
        """Whether it was here."""
        copies = self._copies.get(stream.request_id, [])
        if stream not in copies:
            return False
        copies.remove(stream)
        if not copies:
            del self._copies[stream.request_id]
        return True

"""What a lease says: the reply subject of a JetStream delivery."""

from __future__ import annotations

from typing import NamedTuple

from millrace.schemas.errors import MalformedMessageError


class Delivery(NamedTuple):
    """One delivery of one stored message; ``stored_ns`` is UTC epoch."""

    num_deliveries: int
    stream_sequence: int
    stored_ns: int


def read_lease(lease: str) -> Delivery:
    """Raises MalformedMessageError for a string that is not a lease.

    ``$JS.ACK.<stream>.<consumer>.<deliveries>.<stream seq>.<consumer seq>.<time>.<pending>``, or
    with domain and account hash after ``$JS.ACK`` and perhaps more behind.
    """
    parts = lease.split(".")
    fields = parts[4:] if len(parts) == 9 else parts[6:]
    if parts[:2] == ["$JS", "ACK"] and len(fields) >= 5 and all(map(str.isdecimal, fields[:4])):
        return Delivery(int(fields[0]), int(fields[1]), int(fields[3]))
    raise MalformedMessageError("a lease is the reply subject of a delivery")


def consumer_of(lease: str) -> str:
    """``<stream>.<consumer>`` that a delivery came from; empty for what is no lease."""
    parts = lease.split(".")
    if len(parts) == 9:
        return f"{parts[2]}.{parts[3]}"
    return f"{parts[4]}.{parts[5]}" if len(parts) > 9 else ""

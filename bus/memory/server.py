"""Whether the server in memory is up, and what it takes."""

from __future__ import annotations

from millrace.runtime.clock import Clock
from millrace.schemas.config import NatsConfig
from millrace.schemas.errors import BusUnavailableError, PayloadTooLargeError


class MemoryServer:
    """What the stores of a broker go by. ``failed_streams`` take nothing, each for its cause;
    ``num_starts`` counts the starts."""

    def __init__(self, clock: Clock, config: NatsConfig, max_payload_bytes: int) -> None:
        self.clock = clock
        self.config = config
        self.max_payload_bytes = max_payload_bytes
        self.up = True
        self.num_starts = 1
        self.failed_streams: dict[str, str] = {}

    def require_up(self) -> None:
        """Raises BusUnavailableError while the server is stopped."""
        if not self.up:
            raise BusUnavailableError("The message bus cannot be reached. Try again later.")

    def require_store(self, stream: str) -> None:
        """Raises BusUnavailableError while the server is stopped or has given the stream up."""
        self.require_up()
        if stream in self.failed_streams:
            raise BusUnavailableError("The message bus cannot be reached: no answer in time.")

    def require_fits(self, size_bytes: int) -> None:
        """Raises PayloadTooLargeError."""
        if size_bytes > self.max_payload_bytes:
            raise PayloadTooLargeError(size_bytes, self.max_payload_bytes)

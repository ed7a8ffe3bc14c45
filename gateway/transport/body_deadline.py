"""Until when a body must have come: nobody holds a connection by sending it drop by drop."""

from __future__ import annotations

from millrace.gateway.errors import SlowRequestError
from millrace.schemas.config import GatewayConfig


class BodyDeadline:
    """``body_timeout_s`` from its head on, and longer by what its bytes take at
    ``body_bytes_per_s``; at most ``body_timeout_s`` of silence. Times are of one monotonic clock.
    """

    def __init__(self, config: GatewayConfig, begun_s: float) -> None:
        self._timeout_s = config.body_timeout_s
        self._bytes_per_s = config.body_bytes_per_s
        self._begun_s = begun_s

    def at_s(self, num_bytes: int, now_s: float) -> float:
        """When more must have come than ``num_bytes``."""
        whole_s = self._begun_s + self._timeout_s + num_bytes / self._bytes_per_s
        return min(whole_s, now_s + self._timeout_s)

    def error(self, num_bytes: int) -> SlowRequestError:
        return SlowRequestError(
            f"The body came too slowly: {num_bytes} bytes of it. It may take {self._timeout_s:g} s "
            f"and a second more for each {self._bytes_per_s} bytes."
        )

"""What a server says when its permissions keep a process from a subject.

It says so beside the stream of messages and names nothing but the subject, so that without this a
wrong permission would look like a server that does not answer.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable, Iterator

from millrace.schemas.errors import BusForbiddenError

logger = logging.getLogger(__name__)

# nats-py writes what the server says in small letters.
_VIOLATION = re.compile(r'permissions violation for (publish|subscription) to "([^"]*)"')

OnForbidden = Callable[[BusForbiddenError], None]


class Forbidden:
    """The subjects that one connection may not use. Those who ask on one are told at once; each is
    logged once a connection."""

    def __init__(self) -> None:
        self._asking: dict[str, list[tuple[str, OnForbidden]]] = {}
        self._publish: set[str] = set()
        self._subscription: set[str] = set()

    def note(self, error: Exception) -> bool:
        """Whether the error says that a subject is forbidden."""
        found = _VIOLATION.search(str(error).lower())
        if found is None:
            return False
        kind, subject = found.groups()
        known = self._publish if kind == "publish" else self._subscription
        if subject not in known:
            known.add(subject)
            logger.error(
                "the NATS server forbids this process a subject",
                extra={"action": kind, "subject": subject},
            )
        if kind == "publish":
            for asked, on_forbidden in self._asking.get(subject, ())[:]:
                on_forbidden(_error("publish to", asked))
        return True

    def forget(self) -> None:
        """The connection is another now, and so may be the permissions."""
        self._publish.clear()
        self._subscription.clear()

    def check_subscribed(self, subject: str) -> None:
        """Raises BusForbiddenError if a subscription that the server has read was refused."""
        if subject.lower() in self._subscription:
            raise _error("subscribe to", subject)

    @contextlib.contextmanager
    def asking(self, subject: str, on_forbidden: OnForbidden) -> Iterator[None]:
        """Call back if it turns out that nothing may be published there."""
        key = subject.lower()
        callbacks = self._asking.setdefault(key, [])
        entry = (subject, on_forbidden)
        callbacks.append(entry)
        try:
            yield
        finally:
            callbacks.remove(entry)
            if not callbacks:
                self._asking.pop(key, None)


def _error(action: str, subject: str) -> BusForbiddenError:
    return BusForbiddenError(
        f"The NATS server does not let this process {action} {subject}. Give its user the "
        "permissions of this part (deploy/nats/accounts.conf), or correct the user in nats.url."
    )

"""What of a process's stores is worth an alert."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from millrace.runtime.alerts.rules import RULES
from millrace.runtime.alerts.watch import AlertCondition

_SHORT = "MillraceStoreShort"


def store_conditions(
    stores: Iterable[str], troubles: Mapping[str, str], free_bytes: Mapping[str, int]
) -> Iterator[AlertCondition]:
    """Of ``stores``: whether each takes what is to be kept (``troubles`` has those that do not, and
    why), and whether its disk has room, of those whose disk can be seen."""
    for store in stores:
        trouble = troubles.get(store)
        detail = "" if trouble is None else f"{store} {trouble}"
        yield AlertCondition(
            name="MillraceStoreFull", subject=store, holds=trouble is not None, detail=detail
        )
        free = free_bytes.get(store)
        if free is not None:
            yield AlertCondition(
                name=_SHORT, subject=store, value=free, holds=free < RULES[_SHORT].bound
            )

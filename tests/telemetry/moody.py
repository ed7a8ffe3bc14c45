"""A store that fails, refuses or is slow when a test wants it to."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from millrace.telemetry.store.store import (
    PlainTable,
    RejectedRowsError,
    Store,
    StoreUnavailableError,
)


class MoodyStore(Store):
    """Inserts fail while it is ``away``, are refused if they hold the request ``refused_id``, and
    wait for ``gate`` if there is one; ``num_held`` of them have come to it."""

    away = False
    num_times_away = 0
    refused_id = ""
    gate: asyncio.Event | None = None
    num_held = 0
    num_inserts = 0

    @classmethod
    def over(cls, store: Store) -> MoodyStore:
        """The same connections, with moods; ``store`` closes them."""
        moody = cls.__new__(cls)
        moody.__dict__.update(store.__dict__)
        return moody

    async def insert(self, table: PlainTable, columns: Sequence[Sequence[Any]], token: str) -> None:
        if self.away:
            self.num_times_away += 1
            raise StoreUnavailableError("away for a test")
        if self.refused_id and self.refused_id in columns[0]:
            raise RejectedRowsError("refused for a test")
        if self.gate is not None:
            self.num_held += 1
            await self.gate.wait()
        self.num_inserts += 1
        await super().insert(table, columns, token)

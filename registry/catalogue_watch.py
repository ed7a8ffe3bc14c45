"""Follows a catalogue's file, so that models come and go without a restart."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

from millrace.registry.catalogue import Catalogue, load_catalogue
from millrace.runtime.clock import Clock
from millrace.runtime.tasks import Tasks
from millrace.schemas.errors import ConfigError

# How long a change may go unseen.
_LOOK_EVERY_S = 1.0

logger = logging.getLogger(__name__)

OnChange = Callable[[Catalogue, frozenset[str]], Awaitable[None]]
_Version = tuple[int, int, int]


class CatalogueWatch:
    """Looks at the file once a second; one that cannot be read leaves everything as it is, and is
    said once. Owns the task that looks, which ``close`` ends."""

    def __init__(self, path: str, catalogue: Catalogue, clock: Clock, on_change: OnChange) -> None:
        """``catalogue`` is what was read from ``path`` ("": the built-in one, which stays).
        ``on_change`` gets each later one, and the names of the models that are new in it, gone from
        it, or not as they were."""
        self._file = Path(path).expanduser() if path else None
        self._catalogue = catalogue
        self._clock = clock
        self._on_change = on_change
        # Unknown, so that a change between the reading and the first look is seen.
        self._version: _Version | None = None
        self._tasks = Tasks()

    def start(self) -> None:
        if self._file is not None:
            self._tasks.repeat(self.look, _LOOK_EVERY_S, self._clock, "watch the catalogue")

    async def close(self) -> None:
        await self._tasks.close()

    async def look(self) -> None:
        """Read the file if it is another one than last time."""
        if self._file is None:
            return
        version = _version_of(self._file)
        if version is None or version == self._version:
            return
        self._version = version
        try:
            catalogue = await asyncio.to_thread(load_catalogue, str(self._file))
        except ConfigError as error:
            logger.warning("the catalogue stays as it was", extra={"reason": error.message})
            return
        changed = changed_models(self._catalogue, catalogue)
        if changed or catalogue.routes != self._catalogue.routes:
            self._catalogue = catalogue
            logger.info("the catalogue has changed", extra={"models": sorted(changed)})
            await self._on_change(catalogue, changed)


def changed_models(before: Catalogue, after: Catalogue) -> frozenset[str]:
    """The names of models that one of the two does not have, or has otherwise."""
    names = {*before.names(), *after.names()}
    both = {*before.names()} & {*after.names()}
    same = {name for name in both if before.get(name) == after.get(name)}
    return frozenset(names - same)


def _version_of(file: Path) -> _Version | None:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino

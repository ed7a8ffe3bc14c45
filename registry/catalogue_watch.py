"""Watcher of a catalogue's file, so that models come and go without a restart."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

from millrace.registry.catalogue import Catalogue, load_catalogue
from millrace.runtime.clock import Clock
from millrace.runtime.tasks import Tasks
from millrace.schemas.errors import ConfigError

# Maximum delay until a change is seen.
_LOOK_EVERY_S = 1.0

logger = logging.getLogger(__name__)

OnChange = Callable[[Catalogue, frozenset[str]], Awaitable[None]]
_Version = tuple[int, int, int]


class CatalogueWatch:
    """Watcher that reads the file once a second.

    A file that cannot be read changes nothing and is logged once. Owns its task, which ``close``
    ends.
    """

    def __init__(self, path: str, catalogue: Catalogue, clock: Clock, on_change: OnChange) -> None:
        """Create a watcher.

        Args:
            path: the catalogue's file; "": the built-in one, which never changes.
            catalogue: the catalogue read from ``path``.
            on_change: called with each later catalogue, and the names of models that are new, gone
                or changed.
        """
        self._file = Path(path).expanduser() if path else None
        self._catalogue = catalogue
        self._clock = clock
        self._on_change = on_change
        # Unknown at first, so that a change before the first look is seen.
        self._version: _Version | None = None
        self._tasks = Tasks()

    def start(self) -> None:
        if self._file is not None:
            self._tasks.repeat(self.look, _LOOK_EVERY_S, self._clock, "watch the catalogue")

    async def close(self) -> None:
        await self._tasks.close()

    async def look(self) -> None:
        """Read the file if it has changed since the last look."""
        if self._file is None:
            return
        version = _version_of(self._file)
        if version is None or version == self._version:
            return
        self._version = version
        try:
            catalogue = await asyncio.to_thread(load_catalogue, str(self._file))
        except ConfigError as error:
            logger.warning("the catalogue is unchanged", extra={"reason": error.message})
            return
        changed = changed_models(self._catalogue, catalogue)
        if changed or catalogue.routes != self._catalogue.routes:
            self._catalogue = catalogue
            logger.info("the catalogue has changed", extra={"models": sorted(changed)})
            await self._on_change(catalogue, changed)


def changed_models(before: Catalogue, after: Catalogue) -> frozenset[str]:
    """Return the names of models that only one of the catalogues has, or that differ."""
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

"""Which models ``millrace up`` runs, and the catalogue that its parts read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from millrace.registry.catalogue import CatalogueEngine, load_catalogue
from millrace.registry.served import outline_of
from millrace.registry.source import resolve


def catalogue_for(
    catalogue: str, models: Sequence[str], file: Path, engine: CatalogueEngine | None = None
) -> tuple[str, tuple[str, ...]]:
    """The catalogue file for all parts and the names of ``models``, each a name, a folder, a GGUF
    file or a hub id. With ``engine`` it is that which runs them.

    The catalogue that is written to ``file`` holds these models and no other, and the routes among
    them, so that none is offered which no worker serves. Fetches what is not on this machine, so
    that nothing starts before the weights are here. Raises ConfigError, ModelNotFoundError or
    CheckpointError.
    """
    known = load_catalogue(catalogue)
    chosen = {entry.name: entry for entry in map(known.entry_for, models)}
    only = known.only(chosen) if engine is None else known.only(chosen).with_engine(engine)
    for name in only.names():
        entry = only.get(name)
        outline_of(entry, resolve(entry))
    only.write(file)
    return str(file), tuple(chosen)

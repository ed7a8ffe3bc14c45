"""Which models ``millrace up`` runs, and the catalogue that its parts read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from registry.catalogue import load_catalogue
from registry.checkpoint import read_model_config
from registry.source import resolve


def catalogue_for(catalogue: str, models: Sequence[str], file: Path) -> tuple[str, tuple[str, ...]]:
    """The catalogue file for all parts and the names of ``models``, each a name or a folder.

    A catalogue with what was given by path or hub id is written to ``file``. Fetches what is not
    on this machine, so that nothing starts before the weights are here. Raises ConfigError,
    ModelNotFoundError or CheckpointError.
    """
    entries = load_catalogue(catalogue)
    names: list[str] = []
    for model in models:
        entries = entries.with_model(model)
        entry = entries.entry_for(model)
        read_model_config(resolve(entry))
        if entry.name not in names:
            names.append(entry.name)
    entries.write(file)
    return str(file), tuple(names)

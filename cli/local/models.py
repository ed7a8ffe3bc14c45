"""Models of ``millrace up``, the catalogues of its parts, and the record of models that were added
and removed while it ran."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import msgspec

from millrace.cli.json_files import formatted_json, read_json
from millrace.cli.local.private_files import write_private
from millrace.registry.catalogue import CatalogueEngine, ModelEntry, load_catalogue
from millrace.registry.served import outline_of
from millrace.registry.source import resolve
from millrace.schemas.config import EngineConfig
from millrace.schemas.engines import (
    EngineKind,
    check_parallel,
    check_quantization,
    check_speculation,
)
from millrace.schemas.errors import MillraceError

# SERVED_FILE is the gateways' catalogue. Schedulers and workers read another one, which also has
# the model that is being added or removed.
SERVED_FILE = "models.yaml"
KNOWN_FILE = "known-models.yaml"
_SAVED_FILE = "models.json"


class AddedModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Model that was added to a running system. ``own_engine``: the engine of ``entry`` runs it;
    otherwise the engine of all models does."""

    entry: ModelEntry
    workers: int = 1
    own_engine: bool = False


class SavedModels(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Changes of a data folder's models since the command line; ``removed`` are names."""

    added: dict[str, AddedModel] = {}
    removed: tuple[str, ...] = ()


def read_saved(data: Path) -> SavedModels:
    """Read the saved changes. Raises ConfigError for a file in another format."""
    advice = "Remove it, and add the models again."
    return read_json(data / _SAVED_FILE, SavedModels, advice) or SavedModels()


def write_saved(data: Path, saved: SavedModels) -> None:
    """Save the changes for the next start."""
    write_private(data / _SAVED_FILE, formatted_json(saved))


def models_to_run(
    named: Sequence[str] | None, default: str, saved: SavedModels
) -> tuple[list[str], dict[str, AddedModel], list[str]]:
    """Return the models to look up in the catalogue, the added models that can still be served, and
    messages about the others.

    ``named`` are the models of the command line. A removed default stays away as long as there is
    another model.
    """
    added, said = {}, []
    for name, model in saved.added.items():
        try:
            outline_of(model.entry, resolve(model.entry))
        except MillraceError as error:
            said.append(f"the model {name}, added earlier, is left out: {error.message}")
        else:
            added[name] = model
    if named:
        return list(named), added, said
    return ([] if added and default in saved.removed else [default]), added, said


def catalogue_for(
    catalogue: str,
    models: Sequence[str],
    file: Path,
    engine: CatalogueEngine | None = None,
    added: Mapping[str, AddedModel] | None = None,
) -> tuple[str, tuple[str, ...]]:
    """Return the catalogue file of all parts, and the names of ``models`` and of ``added`` models.

    Each of ``models`` is a name, a folder, a GGUF file or a hub id, and takes precedence over an
    added model. ``engine``, if given, runs all of them.

    The catalogue written to ``file`` holds these models and the routes among them only, so that
    every offered model has a worker. Missing files are downloaded first, so that nothing starts
    before the weights are here. Raises ConfigError, ModelNotFoundError or CheckpointError.
    """
    known = load_catalogue(catalogue)
    chosen = {entry.name: entry for entry in map(known.entry_for, models)}
    for entry in chosen.values():
        outline_of(entry, resolve(entry))
    chosen = {name: run_by(entry, engine) for name, entry in chosen.items()}
    for name, model in (added or {}).items():
        entry = model.entry if model.own_engine else run_by(model.entry, engine)
        chosen.setdefault(name, entry)
    only = known.only(chosen)
    only.write(file)
    return str(file), tuple(chosen)


def engine_of_all(config: EngineConfig) -> CatalogueEngine | None:
    """Return the catalogue's entry for the engine that runs all models, so that every part knows
    it; None: Millrace's own."""
    if config.kind is EngineKind.REAL:
        return None
    return CatalogueEngine(
        kind=config.kind,
        url=config.url,
        command=config.command,
        arguments=config.arguments,
        served_name=config.served_name,
    )


def run_by(entry: ModelEntry, engine: CatalogueEngine | None) -> ModelEntry:
    """Return the entry with the engine of all models, if there is one.

    Raises ConfigError if that engine does not support the entry's quantization, speculation or
    number of devices.
    """
    if engine is not None:
        check_quantization(entry.quantization, engine.kind)
        check_speculation(entry.speculation, engine.kind)
        parallel = entry.parallel
        check_parallel(parallel.tensor, parallel.pipeline, parallel.experts, engine.kind)
    return entry if engine is None else msgspec.structs.replace(entry, engine=engine)


def engine_message(entry: ModelEntry) -> str:
    """Return which engine runs a GGUF file and why; empty for other models."""
    if not entry.is_gguf:
        return ""
    kind, reason = entry.engine_choice
    name = "Millrace's own engine" if kind is EngineKind.REAL else f"the engine {kind}"
    return f"{entry.name} runs on {name}: {reason}"


def without(saved: SavedModels, named: Collection[str]) -> SavedModels:
    """Return the changes without the models named on the command line, which override them."""
    return SavedModels(
        added={name: model for name, model in saved.added.items() if name not in named},
        removed=tuple(name for name in saved.removed if name not in named),
    )


def with_removed(saved: SavedModels, name: str) -> SavedModels:
    """Return the changes with the model removed, even if it is the default model."""
    added = {one: model for one, model in saved.added.items() if one != name}
    return SavedModels(added=added, removed=tuple(dict.fromkeys((*saved.removed, name))))

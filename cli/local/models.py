"""Which models ``millrace up`` runs, the catalogues that its parts read, and what is remembered of
models that were added and removed while it ran."""

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

# What gateways offer, and what schedulers and workers know: a model that is being added or removed
# is in the second one only.
SERVED_FILE = "models.yaml"
KNOWN_FILE = "known-models.yaml"
_SAVED_FILE = "models.json"


class AddedModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model that was added to a running system. ``own_engine``: it is run by what ``entry`` says,
    whatever runs the others; else by that."""

    entry: ModelEntry
    workers: int = 1
    own_engine: bool = False


class SavedModels(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the models of a data folder differ from what the command line says; ``removed`` are
    names."""

    added: dict[str, AddedModel] = {}
    removed: tuple[str, ...] = ()


def read_saved(data: Path) -> SavedModels:
    """Raises ConfigError for a file that is not ours."""
    advice = "Remove it, and add the models again."
    return read_json(data / _SAVED_FILE, SavedModels, advice) or SavedModels()


def write_saved(data: Path, saved: SavedModels) -> None:
    """Remember it for the next start."""
    write_private(data / _SAVED_FILE, formatted_json(saved))


def models_to_run(
    named: Sequence[str] | None, default: str, saved: SavedModels
) -> tuple[list[str], dict[str, AddedModel], list[str]]:
    """What to look up in the catalogue, the added models that still can be served, and what to say
    of those that cannot. ``named`` are those of the command line; a default that was removed stays
    away as long as there is another model."""
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
    """The catalogue file for all parts and the names of ``models``, each a name, a folder, a GGUF
    file or a hub id, and of those that were ``added`` earlier, unless they are named here. With
    ``engine`` it is that which runs them.

    The catalogue that is written to ``file`` holds these models and no other, and the routes among
    them, so that none is offered which no worker serves. Fetches what is not on this machine, so
    that nothing starts before the weights are here. Raises ConfigError, ModelNotFoundError or
    CheckpointError.
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
    """What the catalogue of a system says of the engine that runs all its models, so that every
    part knows it; None: Millrace's own."""
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
    """The entry, with the engine that runs all models, if there is one. Raises ConfigError if that
    cannot quantize, speculate or compute on several devices as the entry says."""
    if engine is not None:
        check_quantization(entry.quantization, engine.kind)
        check_speculation(entry.speculation, engine.kind)
        parallel = entry.parallel
        check_parallel(parallel.tensor, parallel.pipeline, parallel.experts, engine.kind)
    return entry if engine is None else msgspec.structs.replace(entry, engine=engine)


def without(saved: SavedModels, named: Collection[str]) -> SavedModels:
    """What the command line names is as that says, whatever was done to it earlier."""
    return SavedModels(
        added={name: model for name, model in saved.added.items() if name not in named},
        removed=tuple(name for name in saved.removed if name not in named),
    )


def with_removed(saved: SavedModels, name: str) -> SavedModels:
    """The model stays away from now on, also if it is the one that is served by default."""
    added = {one: model for one, model in saved.added.items() if one != name}
    return SavedModels(added=added, removed=tuple(dict.fromkeys((*saved.removed, name))))

"""``--adapter NAME=PATH``: of commands that run an engine in their own process, and of ``up``."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from millrace.schemas.errors import ConfigError, ParameterError
from millrace.schemas.models.adapters import SEPARATOR

if TYPE_CHECKING:
    from millrace.registry.catalogue import Catalogue
    from millrace.registry.checkpoints.checkpoint import ModelConfig
    from millrace.schemas.models.adapters import Adapter, AdapterRef

# By name.
Adapters = Mapping[str, "AdapterRef"]


def add_adapter_option(parser: argparse._ActionsContainer, use: str) -> None:
    """Declare ``--adapter``; ``use`` says how one is asked for."""
    parser.add_argument(
        "--adapter",
        action="append",
        default=[],
        metavar="NAME=PATH",
        help=f"a LoRA adapter of the model, a folder in PEFT's layout, here or in an object store; "
        f"{use}; may be given several times",
    )


def name_and_source(option: str) -> tuple[str, str]:
    """The parts of an option; a path is made absolute. Raises ConfigError."""
    name, _, source = option.partition("=")
    if not name or not source:
        raise ConfigError(f"--adapter takes NAME=PATH, got {option!r:.200}.")
    return name, absolute_source(source)


def absolute_source(source: str) -> str:
    """A path from here on as others find it; an address, or a hub id that is no path here, as it
    is."""
    from millrace.registry.artifacts.store import is_address
    from millrace.registry.hub import is_hub_id

    path = Path(source).expanduser()
    is_elsewhere = is_address(source) or (is_hub_id(source) and not path.exists())
    return source if is_elsewhere else str(path.absolute())


def read_adapters(options: Sequence[str], config: ModelConfig, max_rank: int) -> Adapters:
    """The adapters of ``options``, which fit a model of ``config``. Raises ConfigError for options
    that are none, ParameterError for a bad name, AdapterError for an adapter that cannot be
    applied, ModelSourceError for an adapter that cannot be fetched."""
    from millrace.registry.adapters import adapter_folder, check_adapter_name
    from millrace.registry.checkpoints.adapters.outline import adapter_version, read_adapter_outline
    from millrace.schemas.models.adapters import AdapterRef

    adapters: dict[str, AdapterRef] = {}
    for option in options:
        name, source = name_and_source(option)
        check_adapter_name(name)
        if name in adapters:
            raise ConfigError(f"--adapter {name} is given twice.")
        folder = adapter_folder(source, name)
        read_adapter_outline(folder, config, max_rank)
        adapters[name] = AdapterRef(name=name, version=adapter_version(folder), source=source)
    return adapters


def adapter_of(name: str | None, adapters: Adapters) -> AdapterRef | None:
    """That of a line that says ``name``: the only one if it says nothing, none if it is empty.
    Raises ParameterError."""
    if name is None:
        return next(iter(adapters.values())) if len(adapters) == 1 else None
    if name and name not in adapters:
        known = ", ".join(adapters) or "none, see --adapter"
        raise ParameterError("adapter", f"there is no adapter {name!r:.200}; there are: {known}")
    return adapters[name] if name else None


def offered_adapter(
    catalogue: Catalogue,
    name: str,
    source: str,
    *,
    model: str | None = None,
    tenants: Sequence[str] = (),
    description: str = "",
) -> Adapter:
    """The adapter at ``source``, as a system with these models offers it: of ``model``, or of the
    only one. Raises MillraceError for what cannot be offered."""
    from millrace.registry.adapters import AdapterOffer, check_offer, outline_for, read_offer
    from millrace.registry.source import resolve

    names = catalogue.names()
    if model is None and len(names) != 1:
        raise ConfigError(f"There are several models; name the adapter's: {', '.join(names)}.")
    entry = catalogue.get(names[0] if model is None else model)
    offer = AdapterOffer(
        name=name,
        model=entry.name,
        source=absolute_source(source),
        tenants=tuple(tenants),
        description=description,
    )
    folder = check_offer(offer, entry.engine_kind, {*names, *catalogue.routes}, entry.prices)
    return read_offer(offer, folder, outline_for(resolve(entry), folder), time.time_ns())


def split_model(name: str, catalogue: Catalogue) -> tuple[str | None, str]:
    """The model and the adapter's own name of ``MODEL:NAME``, None for a name alone."""
    model, separator, own_name = name.rpartition(SEPARATOR)
    return (model, own_name) if separator and model in catalogue.names() else (None, name)

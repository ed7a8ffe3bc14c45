"""Option ``--adapter NAME=PATH`` of ``up`` and of commands that run an engine in their process."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from millrace.schemas.errors import ConfigError, ParameterError
from millrace.schemas.models.adapters import SEPARATOR

if TYPE_CHECKING:
    from millrace.registry.catalogue import Catalogue
    from millrace.registry.checkpoints.checkpoint import ModelConfig
    from millrace.schemas.models.adapters import Adapter, AdapterRef

# Adapters by name.
Adapters = Mapping[str, "AdapterRef"]


def add_adapter_option(parser: argparse._ActionsContainer, use: str) -> None:
    """Declare ``--adapter``; ``use`` explains how a request selects an adapter."""
    parser.add_argument(
        "--adapter",
        action="append",
        default=[],
        metavar="NAME=PATH",
        help=f"a LoRA adapter of the model, a folder in PEFT's layout, here or in an object store; "
        f"{use}; may be given several times",
    )


def name_and_source(option: str) -> tuple[str, str]:
    """Split an option into name and source; make a path absolute. Raises ConfigError."""
    from millrace.registry.adapters import absolute_source

    name, _, source = option.partition("=")
    if not name or not source:
        raise ConfigError(f"--adapter takes NAME=PATH, got {option!r:.200}.")
    return name, absolute_source(source)


def read_adapters(options: Sequence[str], config: ModelConfig, max_rank: int) -> Adapters:
    """Read the adapters of ``options``, which must fit a model of ``config``.

    Raises ConfigError for invalid options, and the errors of ``adapter_refs``.
    """
    from millrace.registry.adapters import adapter_refs

    sources: dict[str, str] = {}
    for option in options:
        name, source = name_and_source(option)
        if name in sources:
            raise ConfigError(f"--adapter {name} is given twice.")
        sources[name] = source
    return adapter_refs(sources, config, max_rank)


def adapter_of(name: str | None, adapters: Adapters) -> AdapterRef | None:
    """Return the adapter of a line with ``name``: without a name the only adapter, with an empty
    name none.

    Raises ParameterError for an unknown name.
    """
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
    """Read the adapter at ``source`` as a system with these models offers it: for ``model``, or for
    the only model.

    Raises MillraceError if the adapter cannot be offered.
    """
    from millrace.registry.adapters import (
        AdapterOffer,
        absolute_source,
        check_offer,
        outline_for,
        read_offer,
    )
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
    """Split ``MODEL:NAME`` into model and adapter name; the model is None for a name alone."""
    model, separator, own_name = name.rpartition(SEPARATOR)
    return (model, own_name) if separator and model in catalogue.names() else (None, name)

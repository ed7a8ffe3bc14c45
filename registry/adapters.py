"""LoRA adapters that requests can select by name: their folders and the models that they fit."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from millrace.registry.artifacts.cache import artifact_cache
from millrace.registry.artifacts.store import is_address
from millrace.registry.checkpoints.adapters.config import CONFIG_FILE
from millrace.registry.checkpoints.adapters.outline import (
    WEIGHTS_FILE,
    AdapterOutline,
    adapter_version,
    read_adapter_outline,
)
from millrace.registry.checkpoints.checkpoint import ModelConfig, read_model_config
from millrace.registry.hub import download, is_hub_id, pinned
from millrace.registry.pricing import PriceBook
from millrace.schemas.engines import EngineKind
from millrace.schemas.errors import AdapterError, ParameterError
from millrace.schemas.jobs import RESERVED_NAMES
from millrace.schemas.models.adapters import SEPARATOR, Adapter, AdapterRef, AdapterTakenError
from millrace.schemas.tenants import check_tenant

_NAME = re.compile(r"[^\s\x00-\x1f:/]{1,128}")
# Engines that apply adapters.
ADAPTING_ENGINES = frozenset({EngineKind.REAL})


class AdapterOffer(NamedTuple):
    """Request to offer an adapter of ``model``.

    ``prices`` are a price book's fields as in JSON; None: the model's prices apply.
    """

    name: str
    model: str
    source: str
    tenants: tuple[str, ...] = ()
    description: str = ""
    prices: dict[str, Any] | None = None


def check_adapter_name(name: str) -> None:
    """Check that requests can select an adapter by this name. Raises ParameterError."""
    if not _NAME.fullmatch(name):
        raise ParameterError(
            "lora_name",
            f"An adapter's name must be text of at most 128 characters without spaces, / and "
            f"{SEPARATOR}, got {name!r:.200}.",
        )
    if name in RESERVED_NAMES:
        raise ParameterError(
            "lora_name", f"The adapter name {name} is reserved; choose another name."
        )


def check_offer(
    offer: AdapterOffer, engine: EngineKind, taken: Collection[str], prices: PriceBook
) -> Path:
    """Return the folder of an offer after checking it.

    Args:
        engine: the engine that runs the model.
        taken: names of models.
        prices: the model's price book.

    Raises:
        ParameterError: a name, tenant or price book is invalid; names the field.
        AdapterTakenError: the name is a model's name.
        AdapterError: the model takes no adapters, or as ``adapter_folder`` raises.
        ModelSourceError: as ``adapter_folder`` raises.
    """
    check_adapter_name(offer.name)
    if offer.name in taken:
        raise AdapterTakenError(offer.name)
    for tenant in offer.tenants:
        try:
            check_tenant(tenant)
        except ValueError as error:
            raise ParameterError("tenants", f"{error}.") from error
    if offer.prices is not None:
        try:
            own = msgspec.convert(offer.prices, PriceBook)
        except ValueError as error:
            raise ParameterError("prices", f"prices is not a price book: {error}.") from error
        if own.currency != prices.currency and prices.device_per_hour:
            raise ParameterError(
                "prices",
                f"prices are in {own.currency}, but devices of {offer.model} cost "
                f"{prices.currency}, and a request has one currency. Give prices in "
                f"{prices.currency}.",
            )
    if engine not in ADAPTING_ENGINES:
        raise AdapterError(
            f"The model {offer.model} is run by {engine}, which does not support adapters. Only "
            "models of Millrace's own engine take adapters."
        )
    return adapter_folder(offer.source, offer.name)


def absolute_source(source: str) -> str:
    """Return a local path as an absolute path; return addresses, and hub ids that are no local
    path, unchanged.
    """
    path = Path(source).expanduser()
    is_elsewhere = is_address(source) or (is_hub_id(source) and not path.exists())
    return source if is_elsewhere else str(path.absolute())


def adapter_refs(
    sources: Mapping[str, str], config: ModelConfig, max_rank: int
) -> dict[str, AdapterRef]:
    """Read the adapters at ``sources``, by name, for a model of ``config``.

    Raises:
        ParameterError: a name is invalid.
        AdapterError: an adapter cannot be applied.
        ModelSourceError: an adapter cannot be fetched.
    """
    adapters = {}
    for name, source in sources.items():
        check_adapter_name(name)
        folder = adapter_folder(source, name)
        read_adapter_outline(folder, config, max_rank)
        adapters[name] = AdapterRef(name=name, version=adapter_version(folder), source=source)
    return adapters


def adapter_folder(source: str, name: str, version: str = "") -> Path:
    """Return the folder of an adapter's files on this machine, and fetch missing files.

    ``source`` may be a local folder, an address in an object store or a hub id. With a ``version``,
    the files must be of that version.

    Raises:
        AdapterError: the source is invalid, or the files have changed since.
        ModelSourceError: the store or the hub does not deliver the files.
    """
    files = (CONFIG_FILE, WEIGHTS_FILE)
    if is_address(source):
        cache = artifact_cache()
        kept = cache.kept(source, lambda one: _is(one, version)) if version else None
        if kept is not None:
            return kept
        folder = cache.fetch(source, files, f"Adapter {name}")
    elif is_hub_id(source):
        folder = download(source, f"Adapter {name}", files)
    else:
        folder = Path(source).expanduser()
        if not folder.is_absolute() or not folder.is_dir():
            raise AdapterError(
                f"The adapter {name}: {source!r:.200} cannot be found. Give the absolute path of a "
                "folder that is on this machine and on those of the workers, an address in an "
                "object store, or a hub id."
            )
    if version and not _is(folder, version):
        raise AdapterError(
            f"The adapter {name}: its files in {source} have changed since it was offered. Offer "
            "the new files again, and keep each version in a folder of its own."
        )
    return folder


def _is(folder: Path, version: str) -> bool:
    try:
        return adapter_version(folder) == version
    except AdapterError:
        return False


def read_offer(offer: AdapterOffer, folder: Path, outline: AdapterOutline, now_ns: int) -> Adapter:
    """Return the adapter of a checked offer. Reads all of its files."""
    return Adapter(
        name=offer.name,
        version=adapter_version(folder),
        source=_lasting_source(offer.source, folder),
        prices=offer.prices,
        model=offer.model,
        tenants=offer.tenants,
        description=offer.description,
        rank=outline.rank,
        size_bytes=sum((folder / name).stat().st_size for name in (CONFIG_FILE, WEIGHTS_FILE)),
        created_ns=now_ns,
    )


def _lasting_source(source: str, folder: Path) -> str:
    """Return a source that gives a worker the same files later."""
    if is_hub_id(source):
        return pinned(source, folder)
    return source if is_address(source) else str(folder.resolve())


def outline_for(checkpoint: Path, folder: Path) -> AdapterOutline:
    """Return the outline of the adapter in ``folder`` for the model in ``checkpoint``.

    Raises:
        AdapterError: the adapter is invalid or does not fit.
        CheckpointError: the model's config is invalid.
    """
    return read_adapter_outline(folder, read_model_config(checkpoint))

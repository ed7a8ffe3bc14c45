"""LoRA adapters as requests may name them: what is in a folder, for which model."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from millrace.registry.checkpoints.adapters.outline import (
    AdapterOutline,
    adapter_version,
    read_adapter_outline,
)
from millrace.registry.checkpoints.checkpoint import read_model_config
from millrace.registry.pricing import PriceBook
from millrace.schemas.engines import EngineKind
from millrace.schemas.errors import AdapterError, ParameterError
from millrace.schemas.models.adapters import SEPARATOR, Adapter, AdapterTakenError
from millrace.schemas.tenants import check_tenant

_NAME = re.compile(r"[^\s\x00-\x1f:/]{1,128}")
# Whose engines apply adapters.
ADAPTING_ENGINES = frozenset({EngineKind.REAL})


class AdapterOffer(NamedTuple):
    """What somebody wants to offer as an adapter of ``model``. ``prices`` are a price book's fields
    as JSON has them, None: the model's hold."""

    name: str
    model: str
    source: str
    tenants: tuple[str, ...] = ()
    description: str = ""
    prices: dict[str, Any] | None = None


def check_offer(offer: AdapterOffer, engine: EngineKind, taken: Collection[str]) -> Path:
    """The folder of an offer whose model is run by ``engine``; ``taken`` are names of models.

    Raises ParameterError naming the field for a bad name, tenant or price book,
    AdapterTakenError for a model's name, AdapterError for a model that takes no adapters and a
    source that is no folder.
    """
    if not _NAME.fullmatch(offer.name):
        raise ParameterError(
            "lora_name",
            f"An adapter's name must be text of at most 128 characters without spaces, / and "
            f"{SEPARATOR}, got {offer.name!r:.200}.",
        )
    if offer.name in taken:
        raise AdapterTakenError(offer.name)
    for tenant in offer.tenants:
        try:
            check_tenant(tenant)
        except ValueError as error:
            raise ParameterError("tenants", f"{error}.") from error
    if offer.prices is not None:
        try:
            msgspec.convert(offer.prices, PriceBook)
        except ValueError as error:
            raise ParameterError("prices", f"prices are no price book: {error}.") from error
    if engine not in ADAPTING_ENGINES:
        raise AdapterError(
            f"The model {offer.model} is run by {engine}, which is given no adapters here; models "
            "of Millrace's own engine are."
        )
    folder = Path(offer.source).expanduser()
    if not folder.is_absolute() or not folder.is_dir():
        raise AdapterError(
            f"The adapter {offer.name}: {offer.source!r:.300} is no folder by its absolute path; "
            "it must be there on this machine and on those of the workers."
        )
    return folder


def read_offer(offer: AdapterOffer, folder: Path, outline: AdapterOutline, now_ns: int) -> Adapter:
    """The adapter of an offer that was checked. Reads all of its files."""
    return Adapter(
        name=offer.name,
        version=adapter_version(folder),
        source=str(folder.resolve()),
        prices=offer.prices,
        model=offer.model,
        tenants=offer.tenants,
        description=offer.description,
        rank=outline.rank,
        size_bytes=sum(file.stat().st_size for file in folder.iterdir() if file.is_file()),
        created_ns=now_ns,
    )


def outline_for(checkpoint: Path, folder: Path) -> AdapterOutline:
    """The adapter in ``folder``, for the model in ``checkpoint``. Raises AdapterError,
    CheckpointError."""
    return read_adapter_outline(folder, read_model_config(checkpoint))

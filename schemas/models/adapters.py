"""LoRA adapters as the parts of the system name them to one another."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from millrace.schemas.errors import MillraceError

# Between a model's name and an adapter's, where a client names both.
SEPARATOR = ":"


class AdapterRef(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An adapter as a worker is to load it.

    ``version`` names its weights: another fine-tuning of the same ``name`` has another one, so
    neither cached prompts nor a stream that moves ever mix the two. ``source`` is a folder.
    ``prices`` are those of a price book of its own, as JSON has it (None: the model's).
    """

    name: str
    version: str
    source: str
    prices: dict[str, Any] | None = None


class Adapter(AdapterRef, frozen=True, kw_only=True, omit_defaults=True):
    """An adapter of ``model`` that requests may name, for ``tenants`` only (empty: for all), to
    anyone else it does not exist. ``rank`` is the highest of its matrices, ``size_bytes`` that of
    its file; ``created_ns`` is when it was added."""

    model: str
    tenants: tuple[str, ...] = ()
    description: str = ""
    rank: int = 0
    size_bytes: int = 0
    created_ns: int = 0

    @property
    def ref(self) -> AdapterRef:
        return AdapterRef(
            name=self.name, version=self.version, source=self.source, prices=self.prices
        )

    def is_for(self, tenant: str) -> bool:
        """Whether a tenant may know of it."""
        return not self.tenants or tenant in self.tenants


class LoadedAdapter(msgspec.Struct, frozen=True, array_like=True):
    """An adapter that a worker has in a slot; ``num_running`` sequences use it now, so that it
    cannot make room for another."""

    name: str
    version: str
    num_running: int = 0


class LoadLoraAdapterRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``lora_path`` is a folder in PEFT's layout, by its absolute path, there on the machines of
    gateway and workers, its address in an object store, or its hub id. ``base_model_name`` may be
    left out where there is one model. Only ``tenants`` know of it, if any are named. With
    ``load_inplace`` it takes the place of an adapter of that name; what runs with that one goes on
    with it."""

    lora_name: str
    lora_path: str
    base_model_name: str | None = None
    tenants: tuple[str, ...] = ()
    description: str = ""
    prices: dict[str, Any] | None = None
    load_inplace: bool = False


class UnloadLoraAdapterRequest(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """The adapter is offered no more; what runs with it goes on."""

    lora_name: str


class AdapterList(msgspec.Struct, frozen=True, kw_only=True):
    """All adapters, by name."""

    data: tuple[Adapter, ...]
    object: Literal["list"] = "list"


class AdapterTakenError(MillraceError, code="adapter_exists", http_status=409):
    """Another adapter, or a model, has that name."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"The name {name!r:.200} is taken. Remove what has it, or choose another name."
        )


class AdapterNotFoundError(MillraceError, code="adapter_not_found", http_status=404):
    """No adapter has that name."""

    def __init__(self, name: str) -> None:
        super().__init__(f"There is no adapter {name!r:.200}.")

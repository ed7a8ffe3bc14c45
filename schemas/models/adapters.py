"""Messages about LoRA adapters between parts of the system."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from millrace.schemas.errors import MillraceError

# Separates a model's name from an adapter's in a client's model name.
SEPARATOR = ":"


class AdapterRef(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Adapter to load at a worker.

    ``version`` names its weights. Another fine-tuning of the same ``name`` has another version, so
    neither cached prompts nor a moving stream mix the two. ``source`` is a folder. ``prices`` is
    the adapter's own price book as JSON (None: the model's).
    """

    name: str
    version: str
    source: str
    prices: dict[str, Any] | None = None


class Adapter(AdapterRef, frozen=True, kw_only=True, omit_defaults=True):
    """Adapter of ``model``. Only ``tenants`` may use it (empty: all); for other tenants it does not
    exist. ``rank`` is the highest rank of its matrices, ``size_bytes`` the size of its file,
    ``created_ns`` the time it was added."""

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
        """Return whether a tenant may use the adapter."""
        return not self.tenants or tenant in self.tenants


class LoadedAdapter(msgspec.Struct, frozen=True, array_like=True):
    """Adapter in a slot of a worker. ``num_running`` sequences use it now; while there are any, it
    cannot make room for another adapter."""

    name: str
    version: str
    num_running: int = 0


class LoadLoraAdapterRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Request to load an adapter. ``lora_path`` is the absolute path of a folder in PEFT's layout
    on the machines of gateway and workers, an address in an object store, or a hub id.
    ``base_model_name`` may be left out if there is one model. If ``tenants`` are named, only they
    see the adapter. ``load_inplace`` replaces an adapter of the same name; running requests keep
    the old one."""

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
    """Request to unload an adapter: it is no longer offered, and running requests keep it."""

    lora_name: str


class AdapterList(msgspec.Struct, frozen=True, kw_only=True):
    """List of all adapters, by name."""

    data: tuple[Adapter, ...]
    object: Literal["list"] = "list"


class AdapterTakenError(MillraceError, code="adapter_exists", http_status=409):
    """Error for a name that another adapter, or a model, already has."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"The name {name!r:.200} is taken. Remove the adapter or model of that name, or choose "
            "another name."
        )


class AdapterNotFoundError(MillraceError, code="adapter_not_found", http_status=404):
    """Error for an unknown adapter name."""

    def __init__(self, name: str) -> None:
        super().__init__(f"There is no adapter {name!r:.200}.")

"""LoRA adapters as the parts of the system name them to one another."""

from __future__ import annotations

import msgspec


class AdapterRef(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An adapter as a worker is to load it.

    ``version`` names its weights: another fine-tuning of the same ``name`` has another one, so
    neither cached prompts nor a stream that moves ever mix the two. ``source`` is a folder, a hub
    id or an address in an object store.
    """

    name: str
    version: str
    source: str


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
        return AdapterRef(name=self.name, version=self.version, source=self.source)

    def is_for(self, tenant: str) -> bool:
        """Whether a tenant may know of it."""
        return not self.tenants or tenant in self.tenants


class LoadedAdapter(msgspec.Struct, frozen=True, array_like=True):
    """An adapter that a worker has in a slot; ``num_running`` sequences use it now, so that it
    cannot make room for another."""

    name: str
    version: str
    num_running: int = 0

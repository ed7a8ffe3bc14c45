"""Endpoints from which blocks of a worker's KV cache are pulled (``docs/kv-cache.md``)."""

from __future__ import annotations

import msgspec


class BlockPart(msgspec.Struct, frozen=True, array_like=True):
    """Part of each block of a KV cache that one rank has: a range of the model's layers and a range
    of their heads of keys and values."""

    first_layer: int
    num_layers: int
    first_head: int
    num_heads: int


class TransferEndpoint(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Endpoint at which a worker's engine serves blocks of its KV cache; it travels in
    ``WorkerStatus``.

    Blocks may be pulled between equal ``layout``s: weights, types, block size and, unless workers
    are configured otherwise, everything that their bits depend on. The split of a block into
    ``parts``, one for each rank of the worker's group, may then differ. ``host`` identifies a
    machine: a peer on the same machine may use ``socket``, the path of a Unix socket; other peers
    use ``address``, ``host:port`` (empty: not served across machines). A peer must show ``token``
    before it may read; only this cluster's bus carries the token. ``nixl`` is the name of the NIXL
    agent by which the memory can also be read (empty: none).
    """

    layout: str
    token: str
    host: str = ""
    socket: str = ""
    address: str = ""
    nixl: str = ""
    parts: tuple[BlockPart, ...] = ()


class KvSource(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Worker that has the leading blocks of a request's tokens, about ``num_tokens`` of them; it
    travels in ``Dispatch``. Blocks that cannot be pulled in time are computed."""

    worker_id: str
    endpoint: TransferEndpoint
    num_tokens: int = 0

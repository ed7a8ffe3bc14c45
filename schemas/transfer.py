"""Where blocks of a worker's KV cache can be pulled from, and by whom (``docs/kv-cache.md``)."""

from __future__ import annotations

import msgspec


class BlockPart(msgspec.Struct, frozen=True, array_like=True):
    """What one rank has of each block of a KV cache: so many of the model's layers and of their
    heads of keys and values, from the first ones on."""

    first_layer: int
    num_layers: int
    first_head: int
    num_heads: int


class TransferEndpoint(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where a worker's engine serves blocks of its KV cache; it travels in ``WorkerStatus``.

    ``layout`` is equal where blocks may be taken: weights, types, block size and, unless workers
    are told otherwise, all that their bits depend on. How a block is split into ``parts``, one for
    each rank of the worker's group, may differ then.
    ``host`` tells machines apart: a peer on the same one may use ``socket``, the path of a Unix
    socket; others use ``address``, ``host:port`` (empty: not served across machines). A peer shows
    ``token`` before it may read, which only this cluster's bus tells. ``nixl`` is the name of the
    NIXL agent by which the memory can be read, too (empty: there is none).
    """

    layout: str
    token: str
    host: str = ""
    socket: str = ""
    address: str = ""
    nixl: str = ""
    parts: tuple[BlockPart, ...] = ()


class KvSource(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Which worker has the leading blocks of a request's tokens, about ``num_tokens`` of them; it
    travels in ``Dispatch``. What cannot be pulled from there in time is computed."""

    worker_id: str
    endpoint: TransferEndpoint
    num_tokens: int = 0

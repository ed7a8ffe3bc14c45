"""Keys of prompt prefixes, which workers keep their KV blocks by and schedulers look for."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

# 128 bits: two different prefixes of a fleet's lifetime meet with a chance below 1e-15.
KEY_BYTES = 16
# Of a key, what workers report: a false match costs a scheduler a worse choice, no more.
REPORTED_BYTES = 8


def root_key(salt: str) -> bytes:
    """The key of the empty prefix. Prefixes under different salts never meet."""
    return blake2b(salt.encode(), digest_size=KEY_BYTES).digest()


def salt_of(tenant: str, cache_salt: str, adapter_version: str = "") -> str:
    """What keeps the prefixes of a request apart: its tenant (empty if all share them), the salt of
    its own and the version of its adapter, if it has them."""
    if not (cache_salt or adapter_version):
        return tenant
    own = blake2b(cache_salt.encode(), digest_size=KEY_BYTES).hexdigest() if cache_salt else ""
    return f"{tenant}\0{own}\0{adapter_version}" if adapter_version else f"{tenant}\0{own}"


def extend_keys(
    keys: list[bytes],
    root: bytes,
    token_ids: Sequence[int],
    *,
    num_blocks: int,
    block_size_tokens: int,
) -> None:
    """Append the keys of the blocks up to ``num_blocks``.

    A block's key is the hash of its tokens and of the key before it, so it stands for all tokens
    from the first on; 0.7 us a block.
    """
    first = len(keys)
    raw = array(
        "I", token_ids[first * block_size_tokens : num_blocks * block_size_tokens]
    ).tobytes()
    size = 4 * block_size_tokens
    key = keys[-1] if keys else root
    for start in range(0, (num_blocks - first) * size, size):
        key = blake2b(key + raw[start : start + size], digest_size=KEY_BYTES).digest()
        keys.append(key)

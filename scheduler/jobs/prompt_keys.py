"""What a prompt's prefixes are looked for by."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from millrace.schemas.jobs import Job
from millrace.schemas.pooling import Pooling
from millrace.schemas.prefix import REPORTED_BYTES, extend_keys, root_key, salt_of

# Reported keys are read as numbers, in this machine's order, of jobs and of reports alike. Below
# 2**60 they take a third less memory.
_MASK = (1 << 60) - 1


def read_keys(reported: bytes) -> list[int]:
    """Keys of a report as numbers. Raises ValueError unless they are whole."""
    return [key & _MASK for key in array("Q", reported)]


class PromptKeys:
    """The keys of a prompt's blocks, hashed when they are first asked for, and once: 0.7 us a block
    of 16 tokens.

    A worker has at most as much of it cached as leaves it one token to compute.
    """

    __slots__ = ("_adapter_version", "_by_kind", "_cache_salt", "_tenant", "_token_ids")

    def __init__(
        self,
        token_ids: Sequence[int],
        tenant: str,
        cache_salt: str = "",
        adapter_version: str = "",
    ) -> None:
        self._token_ids = token_ids
        self._tenant = tenant
        self._cache_salt = cache_salt
        self._adapter_version = adapter_version
        self._by_kind: dict[tuple[int, bool], list[int]] = {}

    @classmethod
    def of_job(cls, job: Job) -> PromptKeys:
        """Those of a prepared job; none if its whole prompt has to be computed in any case."""
        whole = job.pooling is Pooling.MEAN or job.sampling.prompt_logprobs is not None
        token_ids = () if whole else job.prompt_token_ids or ()
        return cls(token_ids, job.tenant, job.cache_salt, job.adapter_version)

    def of(self, block_size_tokens: int, *, salted: bool) -> list[int]:
        """For workers with blocks of this size; ``salted`` if they keep tenants apart."""
        kind = (block_size_tokens, salted)
        keys = self._by_kind.get(kind)
        if keys is None:
            keys = self._by_kind[kind] = self._hash(block_size_tokens, salted=salted)
        return keys

    def _hash(self, block_size_tokens: int, *, salted: bool) -> list[int]:
        keys: list[bytes] = []
        num_blocks = (len(self._token_ids) - 1) // block_size_tokens
        if num_blocks > 0:
            try:
                extend_keys(
                    keys,
                    root_key(
                        salt_of(
                            self._tenant if salted else "",
                            self._cache_salt,
                            self._adapter_version,
                        )
                    ),
                    self._token_ids,
                    num_blocks=num_blocks,
                    block_size_tokens=block_size_tokens,
                )
            except OverflowError:
                return []  # no token has such an id: a worker will refuse it, whichever it is
        return read_keys(b"".join([key[:REPORTED_BYTES] for key in keys]))


NO_KEYS = PromptKeys((), "")

"""Prefix keys of a prompt."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from millrace.schemas.jobs import Job
from millrace.schemas.pooling import Pooling
from millrace.schemas.prefix import REPORTED_BYTES, extend_keys, root_key, salt_of

# Keys of jobs and reports are read as integers in native byte order. Below 2**60 they take a third
# less memory.
_MASK = (1 << 60) - 1


def read_keys(reported: bytes) -> list[int]:
    """Return a report's keys as integers. Raises ValueError for a partial key."""
    return [key & _MASK for key in array("Q", reported)]


class PromptKeys:
    """Prefix keys of a prompt's blocks, hashed once on first use: 0.7 us a block of 16 tokens.

    At least one token of the prompt has no key, as a worker must compute one.
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
        """Return the keys of a prepared job; none if its whole prompt must be computed anyway."""
        whole = job.pooling is Pooling.MEAN or job.sampling.prompt_logprobs is not None
        token_ids = () if whole else job.prompt_token_ids or ()
        return cls(token_ids, job.tenant, job.cache_salt, job.adapter_version)

    def of(self, block_size_tokens: int, *, salted: bool) -> list[int]:
        """Return the keys for a block size; ``salted`` if the workers separate tenants."""
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
                return []  # no token has such an id: any worker will refuse the job
        return read_keys(b"".join([key[:REPORTED_BYTES] for key in keys]))


NO_KEYS = PromptKeys((), "")

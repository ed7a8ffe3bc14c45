"""Input and output files of batches, and ids that sort by time."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator

from millrace.bus.store.objects import Objects, StoredObject
from millrace.gateway.errors import NotFoundError
from millrace.schemas.batches.batches import FileObject, FilePurpose

_NS_PER_MS = 1_000_000


_NS_PER_S = 1_000_000_000


def new_ordered_id(prefix: str, now_ns: int) -> str:
    """Return a new id that sorts by time: ``prefix``, milliseconds and 48 random bits."""
    return f"{prefix}{now_ns // _NS_PER_MS:012x}{secrets.token_hex(6)}"


def created_ms(ordered_id: str) -> int:
    """Return the creation time of an id in ms. Raises ValueError for another kind of id."""
    return int(ordered_id[-24:-12], 16)


class Files:
    """Files of all tenants, in the bus's object store."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects

    async def put(
        self,
        tenant: str,
        file_id: str,
        chunks: AsyncIterator[bytes],
        filename: str,
        purpose: FilePurpose,
    ) -> FileObject:
        """Store a file; an existing file stays."""
        metadata = {"filename": filename, "purpose": purpose.value}
        return self._file(await self._objects.put(tenant, file_id, chunks, metadata))

    async def get(self, tenant: str, file_id: str) -> tuple[FileObject, StoredObject]:
        """Return a file. Raises NotFoundError, also for another tenant's file."""
        stored = await self._objects.info(tenant, file_id)
        if stored is None:
            raise NotFoundError(f"There is no file {file_id!r:.100}.")
        return self._file(stored), stored

    def read(self, stored: StoredObject) -> AsyncIterator[bytes]:
        """Read the bytes of a file. Raises ObjectLostError if bytes are missing."""
        return self._objects.read(stored)

    async def ids(self, tenant: str) -> list[str]:
        return await self._objects.names(tenant)

    async def files(self, tenant: str, ids: list[str]) -> list[FileObject]:
        """Return the files that still exist."""
        return [self._file(stored) for stored in await self._objects.infos(tenant, ids)]

    async def delete(self, tenant: str, file_id: str) -> None:
        """Delete a file. Raises NotFoundError."""
        if not await self._objects.delete(tenant, file_id):
            raise NotFoundError(f"There is no file {file_id!r:.100}.")

    def _file(self, stored: StoredObject) -> FileObject:
        created_s = stored.stored_ns // _NS_PER_S
        return FileObject(
            id=stored.name,
            bytes=stored.size_bytes,
            created_at=created_s,
            expires_at=created_s + round(self._objects.ttl_s),
            filename=stored.metadata["filename"],
            purpose=FilePurpose(stored.metadata["purpose"]),
        )

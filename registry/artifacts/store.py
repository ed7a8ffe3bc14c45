"""Object stores, by the address of a folder: s3://bucket/path, gs:// or az://."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from millrace.runtime.addresses import exempt_loopback
from millrace.schemas.errors import MillraceError

if TYPE_CHECKING:
    from obstore import GetOptions
    from obstore.store import ObjectStore

_ADDRESS = re.compile(r"(s3|gs|az)://[^\s/?#]+(/[^\s?#]*)?")
_CHUNK_BYTES = 1 << 20
# Limits of one request; a body that breaks off is resumed where it stopped.
_MAX_RETRIES, _RETRY_TIMEOUT_S = 3, 15


class ModelSourceError(MillraceError, code="model_source_unavailable", http_status=503):
    """Source of a model's files that does not deliver them: unknown, forbidden or unreachable."""


class StoreUnreachableError(ModelSourceError, retryable=True):
    """Object store that does not answer; an existing copy can be used instead."""


class StoredFile(NamedTuple):
    """File in a store: ``path`` is relative to the address, and ``tag`` changes with the
    contents.
    """

    path: str
    size_bytes: int
    tag: str


def is_address(source: str) -> bool:
    """Return whether a source is in an object store."""
    return _ADDRESS.fullmatch(source) is not None


class StoredFolder:
    """Folder in an object store.

    Credentials and endpoints come from the environment variables of the store's own tools
    (``AWS_ACCESS_KEY_ID``, ``AWS_ENDPOINT_URL``, ``GOOGLE_…``, ``AZURE_…``).

    Errors name the address and ``about``, the purpose of the files: StoreUnreachableError if the
    store does not answer, ModelSourceError if it refuses.
    """

    def __init__(self, address: str, about: str) -> None:
        self._about = f"{about}: {address}"
        self._store = self._open(address)

    def files(self) -> list[StoredFile]:
        """Return all files in the folder, by path."""
        import obstore

        found: list[StoredFile] = []
        try:
            for batch in obstore.list(self._store):
                found += [
                    StoredFile(one["path"], one["size"], one["e_tag"] or f"{one['last_modified']}")
                    for one in batch
                ]
        except Exception as error:
            raise self._told(error) from error
        return sorted(found)

    def read(self, file: StoredFile, start: int) -> Iterator[bytes]:
        """Yield the file from the byte ``start`` on, if it is still the listed version."""
        import obstore

        try:
            options: dict[str, Any] = {"range": (start, file.size_bytes)}
            if file.tag.endswith('"'):  # otherwise a date
                options["if_match"] = file.tag
            answer = obstore.get(self._store, file.path, options=cast("GetOptions", options))
            for chunk in answer.stream(min_chunk_size=_CHUNK_BYTES):
                yield bytes(chunk)
        except Exception as error:
            raise self._told(error) from error

    def _open(self, address: str) -> ObjectStore:
        import datetime

        from obstore.store import from_url

        exempt_loopback()
        try:
            return from_url(
                address,
                client_options={"allow_http": True},
                retry_config={
                    "max_retries": _MAX_RETRIES,
                    "retry_timeout": datetime.timedelta(seconds=_RETRY_TIMEOUT_S),
                },
            )
        except Exception as error:
            raise self._told(error) from error

    def _told(self, error: Exception) -> ModelSourceError:
        """Convert the library's error to ours."""
        from obstore import exceptions

        text = str(error).partition("\n")[0]
        if isinstance(error, exceptions.PreconditionError):
            return StoreUnreachableError(f"{self._about} changed while it was read. Try again.")
        if isinstance(error, exceptions.UnauthenticatedError | exceptions.PermissionDeniedError):
            return ModelSourceError(
                f"{self._about} cannot be read with the credentials of this environment, if it has "
                "any."
            )
        if "NoSuchBucket" in str(error) or isinstance(error, FileNotFoundError):
            return ModelSourceError(f"{self._about} does not exist: no such bucket or object.")
        # Without credentials in the environment, the library asks the cloud's metadata service.
        if any(word in text for word in ("redentials", "latest/api/token", "computeMetadata")):
            return ModelSourceError(
                f"{self._about} needs credentials, and the environment has none. Set the store's "
                "variables, such as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY."
            )
        return StoreUnreachableError(f"{self._about} cannot be read: {text:.300}")

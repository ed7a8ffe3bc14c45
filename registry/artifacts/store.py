"""Object stores, by the address of a folder in one: s3://bucket/path, gs:// and az:// likewise."""

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
# Of one request; what is cut in the middle of a body goes on from where it was.
_MAX_RETRIES, _RETRY_TIMEOUT_S = 3, 15


class ModelSourceError(MillraceError, code="model_source_unavailable", http_status=503):
    """Where a model's files are does not give them: unknown, not allowed, or out of reach."""


class StoreUnreachableError(ModelSourceError, retryable=True):
    """An object store does not answer; a copy that is here already will do."""


class StoredFile(NamedTuple):
    """``path`` is relative to the address; ``tag`` changes with the contents."""

    path: str
    size_bytes: int
    tag: str


def is_address(source: str) -> bool:
    """Whether a source is in an object store."""
    return _ADDRESS.fullmatch(source) is not None


class StoredFolder:
    """A folder in an object store. Credentials and endpoints are those that the environment names
    to the store's own tools (``AWS_ACCESS_KEY_ID``, ``AWS_ENDPOINT_URL``, ``GOOGLE_…``,
    ``AZURE_…``).

    Errors name ``about``, what the files are for, and the address: StoreUnreachableError where
    nothing answers, ModelSourceError where the answer is no.
    """

    def __init__(self, address: str, about: str) -> None:
        self._about = f"{about}: {address}"
        self._store = self._open(address)

    def files(self) -> list[StoredFile]:
        """All that are in it, by path."""
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
        """The file from the byte ``start`` on, as long as it is the one that was listed."""
        import obstore

        try:
            options: dict[str, Any] = {"range": (start, file.size_bytes)}
            if file.tag.endswith('"'):  # else it is a date
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
        """The library's error as ours."""
        from obstore import exceptions

        text = str(error).partition("\n")[0]
        if isinstance(error, exceptions.PreconditionError):
            return StoreUnreachableError(f"{self._about} changed while it was read. Try again.")
        if isinstance(error, exceptions.UnauthenticatedError | exceptions.PermissionDeniedError):
            return ModelSourceError(
                f"{self._about} may not be read with the credentials of this environment, or there "
                "are none."
            )
        if "NoSuchBucket" in str(error) or isinstance(error, FileNotFoundError):
            return ModelSourceError(f"{self._about} does not exist: no such bucket or object.")
        # Without credentials in the environment the clouds' own machines are asked for theirs.
        if any(word in text for word in ("redentials", "latest/api/token", "computeMetadata")):
            return ModelSourceError(
                f"{self._about} needs credentials, and this environment names none: set those of "
                "the store, such as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY."
            )
        return StoreUnreachableError(f"{self._about} cannot be read: {text:.300}")

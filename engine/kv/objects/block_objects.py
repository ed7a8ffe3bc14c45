"""Objects of a few consecutive blocks each, in an object store."""

from __future__ import annotations

import datetime
import re
import struct
from collections.abc import Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple

from millrace.engine.config import ResolvedEngineConfig
from millrace.engine.kv.block_identity import kept_identity
from millrace.engine.kv.cache import KVCache
from millrace.engine.transfer.memory import checksum_of
from millrace.runtime.addresses import exempt_loopback
from millrace.schemas.errors import ConfigError
from millrace.schemas.redaction import redact_urls

if TYPE_CHECKING:
    from pathlib import Path

    from obstore.store import ObjectStore

# Size of an object. A request to a store takes tens of milliseconds, which pays for some MiB. With
# larger objects, more is computed again where prefixes diverge within an object.
_OBJECT_BYTES = 4 << 20
_MAX_BLOCKS = 16
_MAGIC = b"mrob0001"
# Header of each block: magic, and a checksum of its key and its contents.
_HEADER = struct.Struct("<8sQ")
_NAME_BYTES = 16
_LONGEST_REASON = 300
_CLOUD = re.compile(r"(s3|gs|az)://[^\s/?#@:]+(/[^\s?#]*)?")
_FOLDER = re.compile(r"file:///[^\s?#]+")
# Maximum time that a sequence waits for blocks.
_LONGEST_READ_S = 2.0
# Stores sometimes refuse a request that they accept a moment later.
_MAX_RETRIES = 1


class ObjectStoreError(Exception):
    """Failure of a request to a store."""


class NoObjectError(Exception):
    """Error of a read of an object that does not exist."""


class ObjectPlace(NamedTuple):
    """Memory for block ``number`` of an object."""

    number: int
    key: bytes
    pieces: Sequence[memoryview]


class BlockObjects:
    """Object store in which each object has a run of ``num_blocks`` consecutive blocks.

    A run begins at a multiple of ``num_blocks``. An object's name is a hash of ``identity``, which
    names everything that the bytes of blocks depend on, and of the key of the run's last block.
    That key identifies all tokens up to there. So all writers of a name write the same contents,
    and prefixes that diverge within a run have objects of different names. Each block has its own
    checksum, so any part of an object can be read alone.

    Any thread may call any method. ``reads`` and ``writes`` are the same store, with different
    timeouts.
    """

    def __init__(
        self,
        reads: ObjectStore,
        writes: ObjectStore,
        identity: str,
        block_bytes: int,
        object_bytes: int = _OBJECT_BYTES,
    ) -> None:
        self.block_bytes = block_bytes
        self.num_blocks = min(max(object_bytes // block_bytes, 1), _MAX_BLOCKS)
        self._reads = reads
        self._writes = writes
        self._slot_bytes = _HEADER.size + block_bytes
        what = f"{identity};{self.num_blocks} blocks of {block_bytes} bytes"
        self._kind = blake2b(what.encode(), digest_size=32).digest()

    @property
    def object_bytes(self) -> int:
        """Size of an object in bytes."""
        return self.num_blocks * self._slot_bytes

    def name_of(self, last_key: bytes) -> str:
        """Return the name of the run that ends with a block of this key.

        It does not reveal the key.
        """
        name = blake2b(last_key, key=self._kind, digest_size=_NAME_BYTES).hexdigest()
        return f"{self._kind.hex()[: 2 * _NAME_BYTES]}/{name[:2]}/{name[2:]}"

    def has(self, last_key: bytes) -> bool:
        """Return whether there is an object of the right size. Raises ObjectStoreError."""
        import obstore

        try:
            found = obstore.head(self._reads, self.name_of(last_key))
        except FileNotFoundError as error:
            _check_bucket(error)
            return False
        except BaseException as error:  # a panic of the library is no Exception
            raise _store_error(error) from error
        return int(found["size"]) == self.object_bytes

    def write(self, keys: Sequence[bytes], blocks: Sequence[Sequence[memoryview]]) -> None:
        """Write a run, completely or not at all. Raises ObjectStoreError."""
        import obstore

        contents = bytearray(self.object_bytes)
        at = 0
        for key, pieces in zip(keys, blocks, strict=True):
            _HEADER.pack_into(contents, at, _MAGIC, _checksum(key, pieces))
            at += _HEADER.size
            for piece in pieces:
                contents[at : at + piece.nbytes] = piece
                at += piece.nbytes
        assert at == len(contents), "a run of other blocks"
        try:
            obstore.put(self._writes, self.name_of(keys[-1]), contents, use_multipart=False)
        except BaseException as error:  # a panic of the library is no Exception
            raise _store_error(error) from error

    def read(self, last_key: bytes, places: Sequence[ObjectPlace]) -> int:
        """Read the blocks of ``places``, which are in order of their number.

        Returns:
            The number of leading blocks that are intact.

        Raises NoObjectError or ObjectStoreError.
        """
        import obstore

        first = places[0].number
        start, end = first * self._slot_bytes, (places[-1].number + 1) * self._slot_bytes
        name = self.name_of(last_key)
        try:
            contents = memoryview(obstore.get_range(self._reads, name, start=start, end=end))
        except FileNotFoundError as error:
            _check_bucket(error)
            raise NoObjectError from error
        except BaseException as error:  # a panic of the library is no Exception
            raise _store_error(error) from error
        for num_good, place in enumerate(places):
            at = (place.number - first) * self._slot_bytes
            if not self._filled(place, contents[at : at + self._slot_bytes]):
                return num_good
        return len(places)

    def _filled(self, place: ObjectPlace, slot: memoryview) -> bool:
        if slot.nbytes != self._slot_bytes:
            return False
        magic, checksum = _HEADER.unpack_from(slot)
        at = _HEADER.size
        for piece in place.pieces:
            piece[:] = slot[at : at + piece.nbytes]
            at += piece.nbytes
        return bool(magic == _MAGIC and checksum == _checksum(place.key, place.pieces))


def _checksum(key: bytes, pieces: Sequence[memoryview]) -> int:
    return checksum_of((memoryview(key), *pieces))


def _check_bucket(error: FileNotFoundError) -> None:
    """Raise ObjectStoreError if the bucket is missing. A missing object is not a failure."""
    if "NoSuchBucket" in str(error):
        raise ObjectStoreError("there is no such bucket") from error


def _store_error(error: BaseException) -> ObjectStoreError:
    """Convert the library's error."""
    return ObjectStoreError(str(error).partition("\n")[0][:_LONGEST_REASON])


def block_objects(
    path: Path, config: ResolvedEngineConfig, cache: KVCache, *, is_row_exact: bool
) -> BlockObjects:
    """Open the object store of ``config`` for an engine of the checkpoint folder ``path``.

    ``is_row_exact`` is as for ``block_identity``. No request is sent to the store. Raises
    ConfigError if the settings do not allow one.
    """
    identity = kept_identity("object_cache_url", path, config, cache, is_row_exact=is_row_exact)
    num_layers, _, layer_bytes = cache.blocks.shape
    url, timeout_s = config.object_cache_url, config.object_cache_timeout_s
    assert url is not None
    return BlockObjects(
        open_store(url, min(timeout_s, _LONGEST_READ_S)),
        open_store(url, timeout_s),
        identity,
        num_layers * layer_bytes,
    )


def open_store(url: str, timeout_s: float) -> ObjectStore:
    """Open a store, with credentials and endpoint from the environment. Raises ConfigError."""
    from obstore.store import from_url

    exempt_loopback()
    try:
        if _FOLDER.fullmatch(url):
            return from_url(url, mkdir=True)
        if _CLOUD.fullmatch(url):
            limit = datetime.timedelta(seconds=timeout_s)
            return from_url(
                url,
                client_options={"allow_http": True, "timeout": limit, "connect_timeout": limit},
                retry_config={"max_retries": _MAX_RETRIES, "retry_timeout": limit},
            )
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"engine.object_cache_url: {url} cannot be used: {reason:.300}."
        ) from error
    raise ConfigError(
        f"engine.object_cache_url is {_without_secrets(url)!r}; name a folder in a store, as in "
        "s3://bucket/path, gs://bucket/path, az://container/path or file:///path. Credentials and "
        "endpoint are those of the environment, such as AWS_ACCESS_KEY_ID and AWS_ENDPOINT_URL."
    )


def _without_secrets(url: str) -> str:
    """Return an address without passwords that it may contain."""
    return redact_urls(url).partition("?")[0]

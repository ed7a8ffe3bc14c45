"""The objects of an engine's blocks in the store that its settings name."""

from __future__ import annotations

import datetime
import re
from typing import TYPE_CHECKING

from millrace.engine.config import ResolvedEngineConfig
from millrace.engine.kv.block_identity import kept_identity
from millrace.engine.kv.cache import KVCache
from millrace.engine.kv.objects.block_objects import BlockObjects
from millrace.runtime.addresses import exempt_loopback
from millrace.schemas.errors import ConfigError
from millrace.schemas.redaction import redact_urls

if TYPE_CHECKING:
    from pathlib import Path

    from obstore.store import ObjectStore

_CLOUD = re.compile(r"(s3|gs|az)://[^\s/?#@:]+(/[^\s?#]*)?")
_FOLDER = re.compile(r"file:///[^\s?#]+")
# Nobody waits longer for blocks.
_LONGEST_READ_S = 2.0
# Stores now and then refuse a request that they take a moment later.
_MAX_RETRIES = 1


def block_objects(
    path: Path, config: ResolvedEngineConfig, cache: KVCache, *, is_row_exact: bool
) -> BlockObjects:
    """The objects of ``config`` for an engine of the checkpoint folder ``path``; ``is_row_exact``
    as for ``block_identity``. Nothing is asked of the store. Raises ConfigError if there can be
    none."""
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
    """The store, with credentials and endpoint of the environment."""
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
    """What can be shown of an address that somebody may have put a password into."""
    return redact_urls(url).partition("?")[0]

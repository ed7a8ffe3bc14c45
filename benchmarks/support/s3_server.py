"""Local S3 server for measurements."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import obstore
from obstore.store import from_url

from tests.support.engine.s3 import BUCKET, S3Server, s3_environment

_NICENESS = 19


@contextmanager
def s3_server() -> Iterator[str]:
    """Yield the address of an empty bucket for this process and its later children."""
    server = S3Server(_NICENESS)
    try:
        os.environ |= s3_environment(server.url)
        yield f"s3://{BUCKET}"
    finally:
        server.kill()


def upload(folder: Path, address: str) -> None:
    """Upload the folder's files to an address."""
    store = from_url(address, client_options={"allow_http": True})
    for file in folder.iterdir():
        obstore.put(store, file.name, file.read_bytes())

"""A local S3 server, in a process of its own that leaves the cores to others, as one that is afar
would."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import obstore
from obstore.store import from_url

_STARTS_WITHIN_S = 30.0
_BUCKET = "bench"


@contextmanager
def s3_server() -> Iterator[str]:
    """The address of an empty bucket, which this process and its children may use from then on."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=lambda: os.nice(19),
    )
    url = f"http://127.0.0.1:{port}"
    try:
        _wait(f"{url}/moto-api/")
        os.environ |= {
            "AWS_ENDPOINT_URL": url,
            "AWS_ACCESS_KEY_ID": "bench",
            "AWS_SECRET_ACCESS_KEY": "bench",
            "AWS_REGION": "us-east-1",
        }
        made = urllib.request.Request(f"{url}/{_BUCKET}", method="PUT")
        urllib.request.urlopen(made).close()
        yield f"s3://{_BUCKET}"
    finally:
        server.terminate()
        server.wait()


def upload(folder: Path, address: str) -> None:
    """The folder's files, to an address."""
    store = from_url(address, client_options={"allow_http": True})
    for file in folder.iterdir():
        obstore.put(store, file.name, file.read_bytes())


def _wait(url: str) -> None:
    give_up_s = time.monotonic() + _STARTS_WITHIN_S
    while True:
        try:
            urllib.request.urlopen(url).close()
        except (urllib.error.URLError, OSError):
            if time.monotonic() > give_up_s:
                raise
            time.sleep(0.05)
        else:
            return

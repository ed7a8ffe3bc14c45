"""A real S3 server on this machine, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.error
import urllib.request

from millrace.runtime.addresses import open_directly
from tests.support.servers import die_with_parent, free_port

_STARTS_WITHIN_S = 30.0
BUCKET = "blocks"


class S3Server:
    """S3 server with one bucket, which loses all objects when it ends."""

    def __init__(self, niceness: int = 0) -> None:
        """Start a server; ``niceness`` leaves the cores to others, as a remote server would."""

        def prepare() -> None:
            die_with_parent()
            os.nice(niceness)

        self.port = free_port()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=prepare,
        )
        self.url = f"http://127.0.0.1:{self.port}"
        try:
            self._make_bucket()
        except BaseException:
            self.kill()
            raise

    def _make_bucket(self) -> None:
        self._wait()
        made = urllib.request.Request(f"{self.url}/{BUCKET}", method="PUT")
        open_directly(made, timeout_s=10.0).close()

    def _wait(self) -> None:
        until_s = time.monotonic() + _STARTS_WITHIN_S
        while True:
            try:
                open_directly(f"{self.url}/moto-api/", timeout_s=10.0).close()
            except (urllib.error.URLError, OSError):
                if time.monotonic() > until_s:
                    raise
                time.sleep(0.02)
            else:
                return

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


def s3_environment(url: str) -> dict[str, str]:
    """Return the environment variables of a client of the server at ``url``."""
    return {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "us-east-1",
    }

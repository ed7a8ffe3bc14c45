"""The whole system as a user starts it: ``millrace up`` in a folder of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from millrace.runtime.addresses import open_directly

_POLL_S = 0.05
# Variables that a shell or Kubernetes may set, and that no part of a system may follow.
_DEAD = "http://127.0.0.1:9"
_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "WS_PROXY", "WSS_PROXY", "FTP_PROXY")

DEAD_PROXIES = {
    **dict.fromkeys(_PROXIES, _DEAD),
    **dict.fromkeys(map(str.lower, _PROXIES), _DEAD),
    "NO_PROXY": "",
    "no_proxy": "",
}
SERVICE_LINKS = {
    "MILLRACE_SERVICE_HOST": "10.96.0.1",
    "MILLRACE_SERVICE_PORT": "8000",
    "MILLRACE_SERVICE_PORT_HTTP": "8000",
    "MILLRACE_PORT": "tcp://10.96.0.1:8000",
    "MILLRACE_PORT_8000_TCP": "tcp://10.96.0.1:8000",
    "MILLRACE_PORT_8000_TCP_PROTO": "tcp",
    "MILLRACE_PORT_8000_TCP_PORT": "8000",
    "MILLRACE_PORT_8000_TCP_ADDR": "10.96.0.1",
    "MILLRACE_GATEWAY_PORT": "tcp://10.96.0.2:8000",
}
FOREIGN_VARIABLES = {**DEAD_PROXIES, **SERVICE_LINKS}


@dataclass
class System:
    """A running ``millrace up``, in an environment with variables that it must not follow."""

    data: Path
    arguments: tuple[str, ...] = ()
    starts_within_s: float = 110.0
    environment: Mapping[str, str] = field(default_factory=dict)
    folder: Path | None = None
    """In which it is started, by its installed command's way: nothing in it is imported."""
    _process: subprocess.Popen[bytes] | None = None

    def start(self) -> System:
        """Start it and wait until it is ready, and keeps records, which it does not wait for."""
        self.data.mkdir(parents=True, exist_ok=True)
        with (self.data / "up.log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    *(() if self.folder is None else ("-P",)),
                    *("-m", "millrace"),
                    "up",
                    "--data",
                    str(self.data),
                    *self.arguments,
                ],
                stdout=log,
                stderr=log,
                start_new_session=True,
                cwd=self.folder,
                env={**os.environ, **FOREIGN_VARIABLES, **self.environment},
            )
        deadline = time.monotonic() + self.starts_within_s
        while not (self._endpoints_file.exists() and self._keeps_records()):
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise AssertionError(f"millrace up did not come up:\n{self.output()}{self._logs()}")
            time.sleep(_POLL_S)
        return self

    def _keeps_records(self) -> bool:
        url = urllib.parse.urlsplit(self.endpoints["clickhouse"])
        try:
            with open_directly(f"http://{url.hostname}:{url.port}/ping", timeout_s=2.0):
                return True
        except OSError:
            return False

    @property
    def endpoints(self) -> dict[str, str]:
        """Read the current addresses: a part that was killed may have another port."""
        found: dict[str, str] = json.loads(self._endpoints_file.read_text())
        return found

    @property
    def _endpoints_file(self) -> Path:
        return self.data / "run" / "endpoints.json"

    def stop(self) -> int:
        """SIGTERM, as Ctrl-C does; the exit code. Kills it if it does not end in 15 s."""
        assert self._process is not None
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(15.0)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        return self._process.returncode

    @property
    def http(self) -> str:
        return self.endpoints["http"]

    @property
    def websocket(self) -> str:
        return self.http.replace("http://", "ws://") + "/v1/ws"

    def pid(self, name: str) -> int:
        """The process id of a part, such as ``worker-1``."""
        return int((self.data / "run" / f"{name}.pid").read_text())

    def kill(self, name: str) -> int:
        """kill -9 a part; the pid that it had."""
        pid = self.pid(name)
        os.kill(pid, signal.SIGKILL)
        return pid

    def processes(self) -> list[psutil.Process]:
        """``millrace up`` and all that runs under it."""
        assert self._process is not None
        try:
            root = psutil.Process(self._process.pid)
            return [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def sql(self, query: str) -> list[dict[str, Any]]:
        """Rows of a query on the running store."""
        parameters = urllib.parse.urlencode(
            {"default_format": "JSONEachRow", "database": "millrace", "readonly": "1"}
        )
        url = urllib.parse.urlsplit(self.endpoints["clickhouse"])
        request = urllib.request.Request(
            f"http://{url.hostname}:{url.port}/?{parameters}",
            data=query.encode(),
            headers={
                "X-ClickHouse-User": url.username or "",
                "X-ClickHouse-Key": url.password or "",
            },
        )
        with open_directly(request, timeout_s=10.0) as answer:
            return [json.loads(line) for line in answer.read().splitlines() if line]

    def output(self) -> str:
        return (self.data / "up.log").read_text()

    def _logs(self) -> str:
        logs = sorted((self.data / "logs").glob("*.log"))
        return "".join(f"\n--- {log.name}\n{log.read_text()[-2000:]}" for log in logs)

"""Gateway in a separate process, with its servers, measured from outside."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.support.processes import ProcessUsage, end
from benchmarks.support.simulated_worker import MODEL
from millrace.bench.clients.socket_client import frame
from millrace.runtime.addresses import open_directly
from tests.support.servers import NatsServer, RedisServer, die_with_parent, free_port

TEXT_FRAME = 0x1
HANDSHAKE = (
    b"GET /v1/ws HTTP/1.1\r\nhost: x\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
    b"sec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
    b"sec-websocket-protocol: millrace.v1\r\n\r\n"
)


def sse_request(**fields: Any) -> bytes:
    """Return a streamed chat completion with its HTTP head."""
    messages = [{"role": "user", "content": "go"}]
    body = json.dumps({"model": MODEL, "stream": True, "messages": messages, **fields}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


def socket_request(name: str = "a", **fields: Any) -> bytes:
    """Return a ``generate`` of millrace.v1 as a frame."""
    message = {"type": "generate", "id": name, "model": MODEL, "prompt": "go", **fields}
    return frame(TEXT_FRAME, json.dumps(message).encode())


GATEWAY_ID = "bench"
_START_TIMEOUT_S = 60.0
_POLL_S = 0.05


class GatewayProcess:
    """``python -m millrace.gateway`` on a free port, and the addresses of its servers."""

    def __init__(self, nats_url: str, redis_url: str, log: Path, **settings: object) -> None:
        """Start it; ``settings`` are of the configuration's section ``gateway``."""
        self.nats_url = nats_url
        self.port = free_port()
        self._log = log
        variables = {"port": self.port, "gateway_id": GATEWAY_ID, **settings}
        environment = {
            **os.environ,
            "MILLRACE_NATS__URL": nats_url,
            "MILLRACE_REDIS__URL": redis_url,
            **{f"MILLRACE_GATEWAY__{k.upper()}": str(v) for k, v in variables.items()},
        }
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "millrace.gateway"],
                env=environment,
                stdout=out,
                stderr=out,
                preexec_fn=die_with_parent,
            )
        self.usage = ProcessUsage(self._process.pid)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_ready(self) -> None:
        """Wait until it serves. Raises RuntimeError, with its log, if it does not."""
        give_up_s = time.monotonic() + _START_TIMEOUT_S
        while True:
            with contextlib.suppress(OSError, urllib.error.URLError):
                if self.health()["bus_connected"]:
                    return
            if self._process.poll() is not None or time.monotonic() > give_up_s:
                raise RuntimeError(f"the gateway did not start:\n{self._log.read_text()[-3000:]}")
            time.sleep(_POLL_S)

    def health(self) -> dict[str, Any]:
        """Return the answer of ``/healthz``."""
        with open_directly(f"{self.url}/healthz", timeout_s=10.0) as answer:
            health: dict[str, Any] = json.load(answer)
            return health

    def stop(self) -> None:
        end(self._process)


@contextlib.contextmanager
def running_gateway(**settings: object) -> Iterator[GatewayProcess]:
    """Run NATS, Redis and a gateway during the block."""
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as ends:
        folder = Path(name)
        nats_server = ends.enter_context(NatsServer(folder / "nats"))
        redis_server = ends.enter_context(RedisServer(folder / "redis"))
        gateway = GatewayProcess(
            nats_server.url, redis_server.url, folder / "gateway.log", **settings
        )
        ends.callback(gateway.stop)
        gateway.wait_ready()
        yield gateway

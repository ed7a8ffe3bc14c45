"""Three nats-servers that keep streams together."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from tests.support.servers import NatsServer, free_port

_NUM_SERVERS = 3


@contextlib.contextmanager
def nats_cluster(directory: Path) -> Iterator[str]:
    """The URL of its servers, comma separated. A stream can be created once they have a leader,
    which takes a second or two."""
    ports = [free_port() for _ in range(_NUM_SERVERS)]
    routes = ", ".join(f'"nats://127.0.0.1:{port}"' for port in ports)
    with contextlib.ExitStack() as running:
        servers = []
        for number, port in enumerate(ports):
            options = (
                f"server_name: n{number}\n"
                f'cluster {{ name: test, listen: "127.0.0.1:{port}", routes: [{routes}] }}'
            )
            servers.append(running.enter_context(NatsServer(directory / str(number), options)))
        yield ",".join(server.url for server in servers)

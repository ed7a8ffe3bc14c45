"""Embedded Kafka on one machine without a broker: librdkafka's in-memory cluster.

``python -m millrace.telemetry.kafka.embedded [--write-bootstrap FILE]`` prints the bootstrap
address (and writes it to FILE) and serves until it is stopped or its parent dies. Its contents are
then lost; the bridge replays the outbox.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import sys
import threading
from pathlib import Path
from typing import NoReturn

from confluent_kafka import Producer

_PR_SET_PDEATHSIG = 1
_START_TIMEOUT_S = 10.0


class EmbeddedKafka:
    """Cluster of one broker on a loopback port chosen by the system; it lives in this process until
    ``close``, or until the process ends."""

    def __init__(self) -> None:
        # This client only hosts the cluster; it never produces.
        self._home: Producer | None = Producer(
            {"bootstrap.servers": "embedded", "test.mock.num.brokers": 1, "log_level": 3}
        )
        brokers = self._home.list_topics(timeout=_START_TIMEOUT_S).brokers.values()
        self.bootstrap_servers = ",".join(f"{broker.host}:{broker.port}" for broker in brokers)

    def close(self) -> None:
        self._home = None


def die_with_parent() -> None:
    """Have the kernel stop this process when its parent ends in any way."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() == 1:
        raise SystemExit("the parent has ended already")


def main(arguments: list[str]) -> NoReturn:
    parser = argparse.ArgumentParser(prog="millrace.telemetry.kafka.embedded", description=__doc__)
    parser.add_argument(
        "--write-bootstrap",
        "--port-file",
        type=Path,
        metavar="FILE",
        help="write the bootstrap address to FILE once the cluster is up",
    )
    file: Path | None = parser.parse_args(arguments).write_bootstrap
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    if sys.platform == "linux":
        die_with_parent()
    cluster = EmbeddedKafka()
    if file is not None:
        # Rename into place, so that a reader never sees half an address.
        partial = file.with_name(f"{file.name}.partial")
        partial.write_text(f"{cluster.bootstrap_servers}\n", encoding="utf-8")
        partial.replace(file)
    sys.stdout.write(f"{cluster.bootstrap_servers}\n")
    sys.stdout.flush()
    stop.wait()
    # A clean shutdown of the cluster would wait for its clients, and they for it; there is nothing
    # to save.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])

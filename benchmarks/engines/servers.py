"""A server as a worker starts it, but on a port, for a client that knows no Unix sockets."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from registry.catalogue import Catalogue
from registry.served import ServedModel
from schemas.config import EngineConfig
from schemas.engines import EngineKind
from tests.support.servers import free_port
from workers.servers.kinds import DIALECTS
from workers.servers.server_process import find_program

_STARTS_WITHIN_S = 420.0
_STOPS_WITHIN_S = 20.0
_POLL_S = 0.5
# What precedes the path of the socket in the arguments.
_SOCKET_OPTIONS = {EngineKind.VLLM: "--uds", EngineKind.LLAMACPP: "--host"}


@contextmanager
def serving(kind: str, model: Path, folder: Path) -> Iterator[str]:
    """The URL of a server of this kind, which ends with the context. Raises RuntimeError with the
    end of its log if it does not come up."""
    engine, port = EngineKind(kind), free_port()
    catalogue = Catalogue({}).with_model(str(model))
    served = ServedModel.load(catalogue, catalogue.names()[0])
    dialect = DIALECTS[engine](served, EngineConfig(kind=engine), owned=True)
    program = find_program(dialect.program, "", dialect.package)
    socket = folder / "server.sock"
    command = dialect.command(program, socket)
    arguments = list(command.arguments)
    at = arguments.index(str(socket))
    assert arguments[at - 1] == _SOCKET_OPTIONS[engine]
    arguments[at - 1 : at + 1] = ["--host", "127.0.0.1", "--port", str(port)]
    log = folder / "server.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            arguments,
            stdout=out,
            stderr=subprocess.STDOUT,
            cwd=folder,  # this folder's packages must not hide the server's own
            env={**os.environ, **command.environment, "PYTHONPATH": ""},
        )
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_until_healthy(url + dialect.health_path, process, log)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(_STOPS_WITHIN_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_until_healthy(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline_s = time.monotonic() + _STARTS_WITHIN_S
    while not _is_healthy(url):
        if process.poll() is not None or time.monotonic() > deadline_s:
            end = log.read_text(errors="replace")[-3000:]
            raise RuntimeError(f"the server did not come up:\n{end}")
        time.sleep(_POLL_S)


def _is_healthy(url: str) -> bool:
    try:
        with urlopen(url, timeout=2.0) as answer:
            return bool(answer.status == 200)
    except (URLError, OSError):
        return False

"""A server as a worker starts it, but on a port, for a client that knows no Unix sockets."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.peers.servers import running_server
from millrace.registry.catalogue import Catalogue
from millrace.registry.served import ServedModel
from millrace.schemas.config import EngineConfig
from millrace.schemas.engines import EngineKind
from millrace.workers.servers.dialect import ServerAddress
from millrace.workers.servers.server_process import find_program
from millrace.workers.servers.starting import DIALECTS
from tests.support.servers import free_port

MAX_NUM_SEQUENCES = 32
# What precedes the path of the socket in the arguments.
_SOCKET_OPTIONS = {EngineKind.VLLM: "--uds", EngineKind.LLAMACPP: "--host"}


@contextmanager
def serving(kind: str, model: Path, folder: Path) -> Iterator[str]:
    """The URL of a server of this kind, which ends with the context. Raises RuntimeError with the
    end of its log if it does not come up."""
    engine, port = EngineKind(kind), free_port()
    catalogue = Catalogue({}).with_model(str(model))
    served = ServedModel.load(catalogue, catalogue.names()[0])
    dialect = DIALECTS[engine](
        served, EngineConfig(kind=engine, max_num_sequences=MAX_NUM_SEQUENCES), owned=True
    )
    program = find_program(dialect.program, "", dialect.package)
    address = ServerAddress(folder)
    command = dialect.command(program, address)
    arguments = list(command.arguments)
    at = arguments.index(str(address.socket))
    assert arguments[at - 1] == _SOCKET_OPTIONS[engine]
    arguments[at - 1 : at + 1] = ["--host", "127.0.0.1", "--port", str(port)]
    url = f"http://127.0.0.1:{port}"
    with running_server(url, arguments, command.environment, folder, dialect.health_path):
        yield url

"""Control socket of a running ``millrace up``, in its data folder and accessible to its user only.

A request is a line of JSON, and so is each message of the answer.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from millrace.cli.running import SOCKET_FILE
from millrace.runtime.tasks import Tasks
from millrace.schemas.engines import EngineKind
from millrace.schemas.errors import MillraceError

_MOST_BYTES = 1 << 20

logger = logging.getLogger(__name__)


class StatusRequest(msgspec.Struct, frozen=True, tag="status"):
    """Request for the state of the system, answered by a ``SystemReport``."""


class AddModelRequest(msgspec.Struct, frozen=True, kw_only=True, tag="add_model"):
    """Request to serve another model. ``model`` is a name of the catalogue, a hub id or an absolute
    path. Without ``engine`` it runs on the engine of the other models; without ``quantization`` its
    weights are as in the catalogue. Answered by ``Said``, then ``ControlDone``."""

    name: str
    model: str
    workers: int = 1
    engine: EngineKind | None = None
    engine_url: str = ""
    engine_command: str = ""
    engine_arguments: tuple[str, ...] = ()
    quantization: str | None = None


class RemoveModelRequest(msgspec.Struct, frozen=True, tag="remove_model"):
    """Request to stop serving a model; with ``when_idle`` its workers stop once they are idle.
    Answered by ``Said``, then ``ControlDone``."""

    name: str
    when_idle: bool = False


Request = StatusRequest | AddModelRequest | RemoveModelRequest


class PartReport(msgspec.Struct, frozen=True, kw_only=True):
    """State of a process; ``memory_bytes`` includes its child processes. ``health`` is ``ok`` or a
    description of the problem; ``address`` and ``metrics`` are host:port. A worker computes on
    ``num_devices`` at a time."""

    name: str
    pid: int
    up_s: float
    restarts: int
    memory_bytes: int
    health: str
    address: str | None = None
    metrics: str | None = None
    model: str | None = None
    num_requests: int | None = None
    num_devices: int = 1


class ModelReport(msgspec.Struct, frozen=True, kw_only=True):
    """State of a model. ``state`` is ``serving``, ``at rest`` (no worker until a request comes),
    ``starting``, ``stopping`` or ``no worker``. ``added``: by ``millrace models add``, and kept for
    the next start."""

    name: str
    source: str
    engine: str
    state: str
    workers: int
    added: bool


class SystemReport(msgspec.Struct, frozen=True, kw_only=True, tag="report"):
    """State of the whole system. ``state`` is ``starting``, ``running`` or ``stopping``;
    ``addresses`` have no passwords."""

    state: str
    pid: int
    up_s: float
    addresses: dict[str, str]
    parts: tuple[PartReport, ...]
    models: tuple[ModelReport, ...]

    @property
    def is_well(self) -> bool:
        """True if all parts are healthy and all models are served."""
        is_served = all(model.state in ("serving", "at rest") for model in self.models)
        return (
            self.state == "running" and is_served and all(one.health == "ok" for one in self.parts)
        )


class Said(msgspec.Struct, frozen=True, tag="said"):
    """Progress of a request."""

    text: str


class ControlDone(msgspec.Struct, frozen=True, tag="done"):
    """Success of a request; ``text`` says what was done."""

    text: str


class ControlRefusal(msgspec.Struct, frozen=True, tag="refused"):
    """Refusal of a request, with the reason; the system is unchanged."""

    message: str


Answer = SystemReport | Said | ControlDone | ControlRefusal
Handler = Callable[[Request, Callable[[str], None]], Awaitable[SystemReport | ControlDone]]


class ControlError(MillraceError, code="refused_by_system"):
    """Error if a running system refuses a command or does not answer."""


class ControlServer:
    """Server of commands until ``close``. It owns the socket and the answers in progress; work that
    a command started continues if the command is broken off."""

    def __init__(self, run_dir: Path, handler: Handler) -> None:
        """Create a server.

        Args:
            handler: Answers a request and reports its progress; raises MillraceError to refuse it.
        """
        self._run_dir = run_dir
        self._handler = handler
        self._answers = Tasks()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        (self._run_dir / SOCKET_FILE).unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with _short_path(self._run_dir) as path:
            listener.bind(path)
        listener.setblocking(False)
        self._server = await asyncio.start_unix_server(
            self._on_connection, sock=listener, limit=_MOST_BYTES
        )

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        await self._answers.close()
        (self._run_dir / SOCKET_FILE).unlink(missing_ok=True)

    def _on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._answers.spawn(self._answer(reader, writer), "answer a command")

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        def write(answer: Answer) -> None:
            if not writer.is_closing():
                writer.write(msgspec.json.encode(answer) + b"\n")

        try:
            request = msgspec.json.decode(await reader.readline(), type=Request)
            write(await self._handler(request, lambda text: write(Said(text))))
        except MillraceError as error:
            write(ControlRefusal(error.message))
        except (msgspec.DecodeError, ValueError) as error:
            write(ControlRefusal(f"the request cannot be read: {error}"))
        except Exception as error:
            logger.exception("a command failed")
            write(ControlRefusal(f"it failed: {type(error).__name__}: {error}"))
        finally:
            writer.close()


def ask(
    data: Path, request: Request, say: Callable[[str], None], timeout_s: float | None
) -> SystemReport | ControlDone:
    """Send a request to the system on ``data`` and return its answer; pass progress to ``say``.

    Raises ControlError if the system refuses, ends, or sends nothing for ``timeout_s``.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(timeout_s)
    try:
        with connection, _short_path(data / "run") as path:
            connection.connect(path)
            connection.sendall(msgspec.json.encode(request) + b"\n")
            with connection.makefile("rb") as lines:
                for line in lines:
                    answer: Answer = msgspec.json.decode(line, type=Answer)
                    if isinstance(answer, Said):
                        say(answer.text)
                    elif isinstance(answer, ControlRefusal):
                        raise ControlError(answer.message)
                    else:
                        return answer
    except TimeoutError as error:
        raise ControlError(
            f"the system on {data} does not answer; its log is {data / 'logs' / 'up.log'}"
        ) from error
    except (OSError, msgspec.DecodeError) as error:
        raise ControlError(f"the system on {data} cannot be asked: {error}") from error
    raise ControlError(f"the system on {data} ended before it answered")


@contextmanager
def _short_path(folder: Path) -> Iterator[str]:
    """Yield a short path of the socket for any folder name: socket addresses have at most 107
    characters."""
    handle = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{handle}/{SOCKET_FILE}"
    finally:
        os.close(handle)

"""How commands talk to a ``millrace up`` that runs: over a socket in its data folder, which only
its user can reach. A request is a line of JSON, and so is each thing that is said in answer."""

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
    """How does everything stand? Answered by a ``SystemReport``."""


class AddModelRequest(msgspec.Struct, frozen=True, kw_only=True, tag="add_model"):
    """Serve another model. ``model`` is a name of the catalogue, a hub id or an absolute path;
    without ``engine`` it is run as the others are, without ``quantization`` with the weights as the
    catalogue says. Answered by ``Said``, then ``ControlDone``."""

    name: str
    model: str
    workers: int = 1
    engine: EngineKind | None = None
    engine_url: str = ""
    engine_command: str = ""
    engine_arguments: tuple[str, ...] = ()
    quantization: str | None = None


class RemoveModelRequest(msgspec.Struct, frozen=True, tag="remove_model"):
    """Serve a model no more; with ``when_idle`` its workers stop when they have nothing to do.
    Answered by ``Said``, then ``ControlDone``."""

    name: str
    when_idle: bool = False


Request = StatusRequest | AddModelRequest | RemoveModelRequest


class PartReport(msgspec.Struct, frozen=True, kw_only=True):
    """One process; ``memory_bytes`` are its own and those of all that it started. ``health`` is
    ``ok``, or says in words what is wrong; ``address`` and ``metrics`` are host:port. A worker
    computes on ``num_devices`` at a time."""

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
    """One model. ``state`` is ``serving``, ``at rest`` (no worker, until a request comes),
    ``starting``, ``stopping`` or ``no worker``; ``added``: by ``millrace models add``, and kept for
    the next start."""

    name: str
    source: str
    engine: str
    state: str
    workers: int
    added: bool


class SystemReport(msgspec.Struct, frozen=True, kw_only=True, tag="report"):
    """The whole system. ``state`` is ``starting``, ``running`` or ``stopping``; ``addresses`` are
    without passwords."""

    state: str
    pid: int
    up_s: float
    addresses: dict[str, str]
    parts: tuple[PartReport, ...]
    models: tuple[ModelReport, ...]

    @property
    def is_well(self) -> bool:
        """Everything is up, and does its work."""
        is_served = all(model.state in ("serving", "at rest") for model in self.models)
        return (
            self.state == "running" and is_served and all(one.health == "ok" for one in self.parts)
        )


class Said(msgspec.Struct, frozen=True, tag="said"):
    """What is being done."""

    text: str


class ControlDone(msgspec.Struct, frozen=True, tag="done"):
    """It is done; ``text`` says what."""

    text: str


class ControlRefusal(msgspec.Struct, frozen=True, tag="refused"):
    """It was not done, and why; nothing else has changed."""

    message: str


Answer = SystemReport | Said | ControlDone | ControlRefusal
Handler = Callable[[Request, Callable[[str], None]], Awaitable[SystemReport | ControlDone]]


class ControlError(MillraceError, code="refused_by_system"):
    """A running system said no, or nothing."""


class ControlServer:
    """Answers commands until ``close``. Owns the socket and what is being answered; what a command
    began goes on when the command is broken off."""

    def __init__(self, run_dir: Path, handler: Handler) -> None:
        """``handler`` answers a request, and says meanwhile what it does; it raises MillraceError
        to refuse."""
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
    """What the system on ``data`` answers; ``say`` gets what it tells meanwhile. Raises
    ControlError if it refuses, ends, or says nothing for ``timeout_s``."""
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
    """The socket's path in few characters, whatever the folder is called: an address of a socket
    has 107 of them at most."""
    handle = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{handle}/{SOCKET_FILE}"
    finally:
        os.close(handle)

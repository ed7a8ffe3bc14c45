"""Real servers for tests: own ports and directories, and no process that outlives the test run."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Self

from millrace.cli.local.ports import PortPicker
from millrace.runtime.binaries import nats_server_path, redis_server_path

_PR_SET_PDEATHSIG = 1
_STOP_TIMEOUT_S = 5.0
_libc = ctypes.CDLL(None, use_errno=True)


# Below the kernel's range for outgoing connections, so that a killed server finds its port free.
_PORTS = range(21_000, 31_000)
_picker = PortPicker()


def free_port() -> int:
    """A port of the loopback interface without a listener, and that no other test run, on this
    machine, is given while this one lasts."""
    return _picker.pick("a test's server", random.choice(_PORTS))


def die_with_parent() -> None:
    """Let the kernel kill this process when the thread that started it ends.

    Call it in a child before exec. The thread may end with its process or earlier.
    """
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Server:
    """A server process on a fixed port that can be killed and started again on the same data.

    It runs for as long as its ``with`` block lasts, or from ``start`` to ``stop``; if its owner
    cannot stop it, the process dies with it.
    """

    scheme = "tcp"
    start_timeout_s = 15.0

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None
        directory.mkdir(parents=True, exist_ok=True)

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.port}"

    @property
    def running(self) -> bool:
        return self._process is not None

    @property
    def pid(self) -> int:
        assert self._process is not None, "not started"
        return self._process.pid

    @property
    def log_path(self) -> Path:
        return self.directory / "server.log"

    def command(self) -> list[str]:
        raise AssertionError("each server has its own command")

    def greets(self, connection: socket.socket) -> bool:
        """Return whether the server at the other end serves."""
        raise AssertionError("each server has its own greeting")

    def start(self) -> None:
        """Start, and return once it serves."""
        assert self._process is None, "already started"
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                self.command(),
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                cwd=self.directory,
                preexec_fn=die_with_parent,
            )
        deadline = time.monotonic() + self.start_timeout_s
        while not self._serves():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                log_text = self.log_path.read_text(errors="replace")[-2000:]
                raise AssertionError(f"{type(self).__name__} did not start:\n{log_text}")
            time.sleep(0.01)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def kill(self) -> None:
        """SIGKILL, as in a crash."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """Ask it to end, and insist after a while."""
        self._end(signal.SIGTERM)

    def pause(self) -> None:
        """SIGSTOP: it keeps its connections and answers no request."""
        self._signal(signal.SIGSTOP)
        os.waitpid(self.pid, os.WUNTRACED)  # returns once it has stopped

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None, "not started"
        self._process.send_signal(number)

    def _end(self, number: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _serves(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1.0) as connection:
                connection.settimeout(1.0)
                return self.greets(connection)
        except OSError:
            return False


class NatsServer(Server):
    """nats-server with JetStream; ``options`` are lines of its configuration file, and
    ``store_options`` of JetStream's part of it."""

    scheme = "nats"

    def __init__(self, directory: Path, options: str = "", store_options: str = "") -> None:
        super().__init__(directory)
        self._config_path = directory / "nats.conf"
        self._config_path.write_text(
            f'listen: "127.0.0.1:{self.port}"\n'
            f'jetstream {{ store_dir: "{self.store_path}"\n{store_options} }}\n{options}\n'
        )

    def command(self) -> list[str]:
        return [str(nats_server_path()), "-c", str(self._config_path)]

    def greets(self, connection: socket.socket) -> bool:
        return connection.recv(5) == b"INFO "

    @property
    def store_path(self) -> Path:
        return self.directory / "store"

    def wipe(self) -> None:
        """Delete everything that it stored; only while it does not run."""
        assert not self.running, "stop it first"
        shutil.rmtree(self.store_path, ignore_errors=True)


class RedisServer(Server):
    """redis-server without persistence, or with an append-only log if it ``appends``."""

    scheme = "redis"

    def __init__(self, directory: Path, *, appends: bool = False) -> None:
        super().__init__(directory)
        self._appends = "yes" if appends else "no"

    def command(self) -> list[str]:
        return [
            str(redis_server_path()),
            *("--bind", "127.0.0.1", "--port", str(self.port)),
            *("--save", "", "--appendonly", self._appends, "--dir", str(self.directory)),
        ]

    def greets(self, connection: socket.socket) -> bool:
        connection.sendall(b"PING\r\n")
        return connection.recv(5) == b"+PONG"


class TlsRedisServer(RedisServer):
    """redis-server with TLS and nothing else, and clients that must show a certificate if
    ``verify`` is "yes"; ``options`` are lines of its configuration file. It is Debian's: the one
    of the package has no TLS."""

    scheme = "rediss"

    def __init__(
        self,
        directory: Path,
        files: tuple[Path, Path, Path],
        *,
        verify: str = "no",
        options: str = "",
        sentinel: bool = False,
    ) -> None:
        super().__init__(directory)
        self._ca, certificate, key = files
        self._sentinel = sentinel
        self._config_path = directory / "redis.conf"
        self._config_path.write_text(
            f"bind 127.0.0.1\nport 0\ntls-port {self.port}\ndir {directory}\n"
            f"tls-ca-cert-file {self._ca}\ntls-cert-file {certificate}\ntls-key-file {key}\n"
            f"tls-auth-clients {verify}\ntls-replication yes\n"
            + ("" if sentinel else 'save ""\nappendonly no\n')
            + f"{options}\n"
        )

    def command(self) -> list[str]:
        program = tls_redis_path()
        assert program is not None, "ask for it first"
        return [program, str(self._config_path), *(["--sentinel"] if self._sentinel else [])]

    def greets(self, connection: socket.socket) -> bool:
        return True  # its handshake is the test's affair


def tls_redis_path() -> str | None:
    """Return the redis-server of this machine with TLS, if any.

    An environment's bin may come first on the PATH with a redis-server without TLS.
    """
    for folder in [*os.get_exec_path(), "/usr/bin"]:
        program = shutil.which("redis-server", path=folder)
        if program is not None and _has_tls(program):
            return program
    return None


def _has_tls(program: str) -> bool:
    """Return whether the program has TLS: without it ``--tls-port`` is a bad directive."""
    ran = subprocess.run(
        [program, "--port", "0", "--tls-port", "x"], capture_output=True, text=True, check=False
    )
    return "Bad directive" not in ran.stderr + ran.stdout

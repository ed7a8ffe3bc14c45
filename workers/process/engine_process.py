"""Engine in its own process, so that bus work never delays a step.

``EngineClient`` is the bus side's handle; ``python -m millrace.workers.process.engine_process FD
PARENT_PID`` is the process that it starts.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from pathlib import Path
from typing import cast

from millrace.engine.config import ResolvedEngineConfig
from millrace.engine.types import EngineRequest, EngineStats
from millrace.registry.checkpoints.fingerprint import weights_fingerprint
from millrace.runtime.logs import configure_logging
from millrace.runtime.process import how_it_ended, python_command, python_environment
from millrace.schemas.config import EngineConfig
from millrace.schemas.errors import PrefixCacheKeptError
from millrace.workers.engine_like import EngineFailedError, EngineLike
from millrace.workers.process.loop import serve
from millrace.workers.process.wire import (
    Add,
    Broken,
    Command,
    Load,
    Ready,
    ResetPrefixes,
    Stepped,
    Stop,
    Unpacker,
    pack,
    report_decoder,
)

_CLOSE_TIMEOUT_S = 1.0
_LOG_LEVEL = "MILLRACE_LOG_LEVEL"
_MODULE = "millrace.workers.process.engine_process"


class EngineClient(EngineLike):
    """Owner of the engine's process, from ``start`` until ``close`` or until the process fails.

    ``config`` is the resolved configuration that the engine reported when it was ready.
    """

    config: ResolvedEngineConfig

    def __init__(self, link: _Link, process: asyncio.subprocess.Process) -> None:
        super().__init__()
        self._link = link
        self._process = process
        self._commands: list[Command] = []
        self._loop = asyncio.get_running_loop()
        self._stats = EngineStats()
        link.client = self

    @classmethod
    async def start(
        cls, path: Path, config: EngineConfig, *, shared: bool = True, gather_s: float = 0.0
    ) -> EngineClient:
        """Start the process and return when the checkpoint at ``path`` is loaded.

        Args:
            path: the folder of the checkpoint.
            config: the engine's settings.
            shared: other processes use the machine's cores too.
            gather_s: maximum time that tokens in the middle of answers are held to be sent
                together.

        Raises:
            EngineFailedError: the engine ended or could not load the model.
        """
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        link = _Link()
        try:
            with theirs:
                process = await asyncio.create_subprocess_exec(
                    *python_command(_MODULE, str(theirs.fileno()), str(os.getpid())),
                    pass_fds=(theirs.fileno(),),
                    stdin=asyncio.subprocess.DEVNULL,
                    env={**python_environment(), _LOG_LEVEL: _log_level()},
                )
            await asyncio.get_running_loop().create_unix_connection(lambda: link, sock=ours)
        except BaseException:
            # The process ends by itself once its socket has no other end.
            ours.close()
            raise
        client = cls(link, process)
        link.write(pack(Load(str(path), config, shared, gather_s)))
        try:
            ready = await link.ready
            client.note_stats(ready.stats)
            client.device_uuid = ready.device_uuid
            client.config = ready.config
            client.num_devices = ready.config.num_ranks
            client.transfer_endpoint = ready.transfer_endpoint
            client.weights = await asyncio.to_thread(
                weights_fingerprint, path, ready.config.quantization, ready.config.kv_cache_dtype
            )
        except BaseException:
            await client.close()
            raise
        return client

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def stats(self) -> EngineStats:
        """Statistics as of the last step."""
        return self._stats

    @property
    def max_num_sequences(self) -> int:
        return self.config.max_num_sequences

    def note_stats(self, stats: EngineStats) -> None:
        """Remember the last statistics from the engine's process."""
        self._stats = stats

    def add(self, request: EngineRequest) -> None:
        """Generate for a request from the next step on."""
        self._post(Add(request))

    def cancel(self, request_id: str) -> None:
        """Stop a request before the next step. Outputs of the current step may still arrive."""
        self._post(Stop(request_id))

    async def reset_prefix_cache(self) -> None:
        """Empty the prefix cache. Later requests find only blocks of running requests.

        Raises:
            PrefixCacheKeptError: blocks are also in an object store.
        """
        if self.config.object_cache_url is not None:
            raise PrefixCacheKeptError(
                "engine.object_cache_url is set: other workers use the blocks there, too. Remove "
                "the setting to measure without a prefix cache."
            )
        self._post(ResetPrefixes())

    async def wait_closed(self) -> str:
        """Wait until the engine's process has ended, and return the reason."""
        why = await asyncio.shield(self._link.closed)
        code = await self._reap()
        return why or f"the engine's process ended with {how_it_ended(code)}"

    async def close(self) -> None:
        """End the process; its running requests are lost."""
        self._link.close()
        await self._reap()

    async def _reap(self) -> int:
        try:
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                return await self._process.wait()
        except TimeoutError:
            self._process.kill()
            return await self._process.wait()

    def _post(self, command: Command) -> None:
        """Queue a command; all commands of one turn of the loop go in one message."""
        if not self._commands:
            self._loop.call_soon(self._send)
        self._commands.append(command)

    def _send(self) -> None:
        commands, self._commands = self._commands, []
        self._link.write(pack(commands))


class _Link(asyncio.Protocol):
    """Bus side's end of the socket pair."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.client: EngineClient | None = None
        self.ready: asyncio.Future[Ready] = loop.create_future()
        self.closed: asyncio.Future[str] = loop.create_future()
        self._unpacker = Unpacker()
        self._transport: asyncio.WriteTransport | None = None
        self._why = ""

    def write(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports do not derive from asyncio's classes.
        self._transport = cast("asyncio.WriteTransport", transport)

    def data_received(self, data: bytes) -> None:
        for payload in self._unpacker.feed(data):
            match report_decoder.decode(payload):
                case Stepped(outputs, stats, prefixes, device_times):
                    assert self.client is not None
                    self.client.note_stats(stats)
                    if prefixes is not None:
                        self.client.on_prefixes(prefixes)
                    self.client.on_outputs(outputs, stats)
                    if device_times:
                        self.client.on_device_times(device_times)
                case Ready() as ready:
                    self.ready.set_result(ready)
                case Broken(message):
                    self._why = message

    def connection_lost(self, _exc: Exception | None) -> None:
        if not self.ready.done():
            why = self._why or "the engine's process ended before the model was loaded"
            self.ready.set_exception(EngineFailedError(why))
            self.ready.exception()
        if not self.closed.done():
            self.closed.set_result(self._why)


def _log_level() -> str:
    return logging.getLevelName(logging.getLogger().getEffectiveLevel()).lower()


def main(arguments: list[str]) -> int:
    """Run the engine's process."""
    configure_logging("engine", os.environ[_LOG_LEVEL])
    return serve(int(arguments[0]), int(arguments[1]))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

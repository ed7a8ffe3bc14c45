"""``millrace top``: how a running system does, live in a terminal."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeVar

from cli.endpoints import add_data_argument, locate_nats
from schemas.errors import MillraceError, ParameterError

if TYPE_CHECKING:
    from bus.api import Bus
    from cli.top_view import Snapshot
    from gateway.streams.fleet_view import FleetView

_T = TypeVar("_T")

_SHORTEST_S = 0.2
_ANSWER_WITHIN_S = 2.0
# Schedulers and workers say how they do about twice a second.
_FIRST_NEWS_S = 1.5
_POLL_S = 0.05
_WINDOW_S = 60
_MOST_TENANTS = 20
_INTERRUPTED = 130
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare ``millrace top``."""
    parser = subparsers.add_parser(
        "top",
        help="how a running system does, live",
        description="Show requests, latencies, queues, workers and tenants of the system that runs "
        "on DIR, or of the one on the message bus that --nats or MILLRACE_NATS__URL names. q "
        "quits; where standard output is no terminal, it is printed once.",
    )
    parser.add_argument("--once", action="store_true", help="print it once, as plain text")
    parser.add_argument(
        "--interval",
        type=float,
        default=2.0,
        metavar="S",
        help="seconds between two looks (default: %(default)g)",
    )
    parser.add_argument("--nats", metavar="URL", help="the server to use instead")
    add_data_argument(parser)
    parser.set_defaults(handler=run)


def run(arguments: argparse.Namespace) -> int:
    """0 after q, or once it is printed; 128 and its number after a signal. Raises ParameterError,
    ConfigError and BusUnavailableError."""
    if arguments.interval < _SHORTEST_S:
        raise ParameterError("interval", f"--interval must be at least {_SHORTEST_S} s")
    return asyncio.run(_run(arguments))


async def _run(arguments: argparse.Namespace) -> int:
    from bus import nats
    from gateway.streams.fleet_view import FleetView
    from runtime.clock import SystemClock

    config = locate_nats(arguments.data, arguments.nats)
    bus = await nats.connect(config, "millrace-top")
    fleet = FleetView(SystemClock())
    try:
        await fleet.start(bus)
        place = config.url.rpartition("@")[2]  # what is before it may be a password
        source = Source(bus, fleet, place.removeprefix("nats://"))
        if arguments.once or not sys.stdout.isatty():
            return await _print_once(source)
        return await _Live(source, arguments.interval).run()
    finally:
        await fleet.close()
        await bus.close()


class Source:
    """Where snapshots come from: heartbeats and queue statuses, which are listened to, and
    telemetry, which is asked."""

    def __init__(self, bus: Bus, fleet: FleetView, place: str) -> None:
        self._bus = bus
        self._fleet = fleet
        self._place = place

    async def first_news(self) -> None:
        """Return when both workers and schedulers were heard of, or should have been."""
        for _ in range(round(_FIRST_NEWS_S / _POLL_S)):
            if self._fleet.queues() and self._fleet.live_workers():
                return
            await asyncio.sleep(_POLL_S)

    async def look(self) -> Snapshot:
        """How the system does now. What cannot be had is among the problems."""
        from cli.top_view import Snapshot, TenantRow, Totals, WorkerRow

        problems = [] if self._bus.connected else ["The message bus is away; trying again."]
        window = {"from_s": -_WINDOW_S}
        try:
            totals, tenants, samples = await asyncio.gather(
                self._ask("totals", window, Totals),
                self._ask("top_tenants", {**window, "rows": _MOST_TENANTS}, TenantRow),
                self._ask("workers_now", {}, WorkerRow),
            )
        except (MillraceError, TimeoutError) as error:
            totals, tenants, samples = [], [], []
            reason = error.message if isinstance(error, MillraceError) else "it does not answer"
            problems.append(f"No figures of telemetry: {reason}")
        return Snapshot(
            at_s=time.time(),
            place=self._place,
            window_s=_WINDOW_S,
            totals=totals[0] if totals else None,
            tenants=tuple(tenants),
            queues=tuple(self._fleet.queues()),
            workers=tuple(self._fleet.live_workers()),
            samples=tuple(samples),
            problems=tuple(problems),
        )

    async def _ask(self, name: str, params: Mapping[str, int], row: type[_T]) -> list[_T]:
        import msgspec

        from schemas.control import TelemetryQuery

        query = TelemetryQuery(name=name, params=dict(params))
        answer = await self._bus.control.query_telemetry(query, _ANSWER_WITHIN_S)
        if answer is None:
            raise MillraceError("it does not answer")
        if answer.error:
            raise MillraceError(answer.error)
        try:
            return msgspec.json.decode(answer.rows_json, type=list[row], strict=False)  # type: ignore[valid-type]
        except msgspec.DecodeError as error:
            raise MillraceError(f"the answer to {name} is not of this version: {error}") from error


async def _print_once(source: Source) -> int:
    from cli.top_view import as_text, view

    await source.first_news()
    sys.stdout.write(as_text(view(await source.look())))
    return 0


class _Live:
    """Shows snapshots until somebody has enough of it; the terminal is left as it was then."""

    def __init__(self, source: Source, interval_s: float) -> None:
        from cli.terminal import Terminal

        self._source = source
        self._interval_s = interval_s
        self._terminal = Terminal(self._on_key, self._draw)
        self._snapshot: Snapshot | None = None
        self._over = asyncio.Event()
        self._code = 0

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._end, 128 + number)
        loop.add_signal_handler(signal.SIGWINCH, self._draw)
        loop.add_signal_handler(signal.SIGTSTP, self._terminal.suspend)
        looking = asyncio.create_task(self._look_on())
        looking.add_done_callback(lambda _: self._over.set())
        try:
            self._terminal.enter()
            input_fd = self._terminal.input_fd
            if input_fd is not None:
                loop.add_reader(input_fd, self._on_input, input_fd)
            await self._over.wait()
        finally:
            if self._terminal.input_fd is not None:
                loop.remove_reader(self._terminal.input_fd)
            self._terminal.leave()
            looking.cancel()
            await asyncio.wait([looking])
        if not looking.cancelled():
            looking.result()
        return self._code

    async def _look_on(self) -> None:
        await self._source.first_news()
        while True:
            begun_s = time.monotonic()
            self._snapshot = await self._source.look()
            self._draw()
            await asyncio.sleep(max(_SHORTEST_S, begun_s + self._interval_s - time.monotonic()))

    def _draw(self) -> None:
        from cli.top_view import view

        if self._snapshot is None:
            return
        try:
            self._terminal.show(view(self._snapshot))
        except OSError:
            self._end(128 + signal.SIGHUP)  # the terminal is gone

    def _on_input(self, input_fd: int) -> None:
        if not self._terminal.read_keys():
            asyncio.get_running_loop().remove_reader(input_fd)
            self._end(128 + signal.SIGHUP)

    def _on_key(self, key: bytes) -> None:
        from cli.terminal import is_ctrl_c

        if is_ctrl_c(key):
            self._end(_INTERRUPTED)
        elif key in {b"q", b"Q"}:
            self._end(0)

    def _end(self, code: int) -> None:
        self._code = code
        self._over.set()

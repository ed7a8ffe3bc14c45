"""``millrace top``: live state of a running system in a terminal."""

from __future__ import annotations

import argparse
import asyncio
import sys

from millrace.cli.endpoints import add_data_argument, locate_nats
from millrace.schemas.errors import ParameterError

_MIN_INTERVAL_S = 0.2


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare ``millrace top``."""
    parser = subparsers.add_parser(
        "top",
        help="show a running system live",
        description="Show requests, latencies, queues, workers and tenants of the system that "
        "runs on DIR, or of the one on the message bus that --nats or MILLRACE_NATS__URL names. "
        "Press q to quit. If standard output is not a terminal, the state is printed once.",
    )
    parser.add_argument("--once", action="store_true", help="print it once, as plain text")
    parser.add_argument(
        "--interval",
        type=float,
        default=2.0,
        metavar="S",
        help="seconds between two updates (default: %(default)g)",
    )
    parser.add_argument("--nats", metavar="URL", help="the server to use instead")
    add_data_argument(parser)
    parser.set_defaults(handler=run)


def run(arguments: argparse.Namespace) -> int:
    """Run until q and return 0, or print once; return 128 and its number after a signal.

    Raises ParameterError, ConfigError and BusUnavailableError.
    """
    if not arguments.interval >= _MIN_INTERVAL_S:
        raise ParameterError("interval", f"--interval must be at least {_MIN_INTERVAL_S} s")
    return asyncio.run(_run(arguments))


async def _run(arguments: argparse.Namespace) -> int:
    from millrace.bus import nats
    from millrace.cli.top.live import LiveView
    from millrace.cli.top.source import SnapshotSource
    from millrace.cli.top.view import as_text, view
    from millrace.gateway.streams.fleet_view import FleetView
    from millrace.runtime.clock import SystemClock

    config = locate_nats(arguments.data, arguments.nats)
    bus = await nats.connect(config, "millrace-top")
    fleet = FleetView(SystemClock())
    try:
        await fleet.start(bus)
        place = config.url.rpartition("@")[2]  # what is before it may be a password
        source = SnapshotSource(bus, fleet, place.removeprefix("nats://"))
        if arguments.once or not sys.stdout.isatty():
            await source.first_reports()
            sys.stdout.write(as_text(view(await source.snapshot())))
            return 0
        return await LiveView(source, arguments.interval).run()
    finally:
        await fleet.close()
        await bus.close()

"""``python -m millrace.telemetry [--config FILE]``: one telemetry process."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
import uuid

from millrace.bus.api import Bus
from millrace.bus.nats import connect
from millrace.bus.nats.permissions import Part
from millrace.runtime.clock import Clock, SystemClock
from millrace.runtime.logs import configure_logging
from millrace.runtime.metrics_server import Monitor, monitored
from millrace.runtime.process import exit_code_of, stop_event
from millrace.runtime.settings import load_config
from millrace.runtime.tasks import outcome_unless, wait_unless_done
from millrace.runtime.tracing_setup import open_tracing
from millrace.schemas.config import Config
from millrace.telemetry.metrics import TelemetryMetrics
from millrace.telemetry.service import TelemetryService
from millrace.telemetry.sink.tracing import StoredTraces
from millrace.telemetry.store.store import StoreTakenError, StoreUnavailableError

logger = logging.getLogger("millrace.telemetry")

_RETRY_S = 0.5
# Seconds; longer than any command reads (see ``ReadLimits.max_execution_s``).
_TAKEN_WAIT_S = 45.0


def main(arguments: list[str]) -> int:
    """Run until SIGTERM or SIGINT; return the exit code, as in ``runtime.process``."""
    parser = argparse.ArgumentParser(prog="telemetry", description=__doc__)
    parser.add_argument("--config", metavar="FILE", help="a TOML or YAML configuration file")
    file = parser.parse_args(arguments).config

    def run() -> None:
        config = load_config(file, os.environ)
        configure_logging("telemetry", config.log_level)
        asyncio.run(_serve(config))

    return exit_code_of("telemetry", run)


async def _serve(config: Config) -> None:
    stopping = stop_event()
    async with monitored("telemetry", config.metrics) as monitor:
        monitor.failures.on_giving_up = stopping.set
        await _move(config, stopping, monitor)
        monitor.failures.check()


async def _move(config: Config, stopping: asyncio.Event, monitor: Monitor) -> None:
    # aiokafka logs each of its retries; relevant failures reach our own log.
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)
    instance_id = f"telemetry-{uuid.uuid4().hex[:8]}"
    tracing = open_tracing(config.tracing, "telemetry", instance_id)
    service = await outcome_unless(stopping, open_service(config, SystemClock()))
    if service is None:
        return
    if tracing is not None:
        service.sink.traces = StoredTraces(tracing, SystemClock())
    tasks: list[asyncio.Task[None]] = []
    bus: Bus | None = None
    http = None
    try:
        http = service.serve_http()
        if http is not None:
            tasks.append(asyncio.create_task(http.run(), name="http"))
        bus = await outcome_unless(stopping, connect(config.nats, "telemetry", part=Part.TELEMETRY))
        if bus is None:
            return
        connected = bus
        monitor.registry.register(TelemetryMetrics(service))
        monitor.trouble = lambda: _trouble(service, connected)
        tasks.append(asyncio.create_task(service.run(bus), name="service"))
        logger.info("telemetry is ready", extra={"clickhouse": http.url if http else "server"})
        await wait_unless_done(stopping, tasks)
        service.stop()
        if http is not None:
            http.stop()
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        if bus is not None:
            await bus.close()
        await service.close()
        if tracing is not None:
            await tracing.close()


def _trouble(service: TelemetryService, bus: Bus) -> str:
    """Return why records do not move now; empty if they do."""
    if not bus.connected:
        return "the message bus is unreachable"
    return "; ".join(f"{store} {why}" for store, why in service.stores.troubles().items())


async def open_service(config: Config, clock: Clock) -> TelemetryService:
    """Open the service; retry for ``nats.connect_timeout_s`` while the store is unavailable.

    If another process has the folder open, wait for it up to 45 s.
    """
    began_s, told = clock.monotonic(), ""
    while True:
        try:
            return await TelemetryService.open(config, clock)
        except StoreUnavailableError as error:
            is_taken = isinstance(error, StoreTakenError)
            limit_s = _TAKEN_WAIT_S if is_taken else config.nats.connect_timeout_s
            if clock.monotonic() - began_s > limit_s:
                raise
            if error.message != told:
                told = error.message
                logger.warning("the store is not there yet", extra={"reason": told})
            await clock.sleep(_RETRY_S)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

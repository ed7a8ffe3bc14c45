"""``python -m workers [--config FILE]``: one worker, until SIGTERM or until its engine fails."""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import signal
import sys
from collections.abc import Coroutine
from functools import partial

import uvloop

from bus import nats
from bus.clock import SystemClock
from bus.generations import GenerationIndex
from bus.logs import configure_logging
from bus.process import exit_code_of
from bus.settings import load_config
from registry.catalogue import load_catalogue
from registry.served import ServedModel
from schemas.config import Config
from workers.engine_keeper import EngineKeeper
from workers.engine_process import EngineClient
from workers.worker import Worker

# Few, large collections: most of what the bus side makes is freed by reference counts.
_GC_THRESHOLDS = (50_000, 50, 100)

logger = logging.getLogger("workers")


async def serve(config: Config) -> None:
    """Load, serve and drain. Raises MillraceError."""
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    catalogue = load_catalogue(config.catalogue).with_model(config.worker.model)
    name = catalogue.entry_for(config.worker.model).name
    served_model = await asyncio.to_thread(ServedModel.load, catalogue, name)
    bus = await nats.connect(config.nats, config.worker.name)
    index = GenerationIndex(config.redis)
    try:
        start = partial(EngineClient.start, served_model.path, config.worker.engine)
        first = await _unless_told(stopping, start())
        if first is None:
            return
        clock = SystemClock()
        engine = EngineKeeper(first, start, clock)
        try:
            worker = Worker(bus, config.worker, served_model, engine, clock, index)
            gc.collect()
            gc.freeze()
            gc.set_threshold(*_GC_THRESHOLDS)
            logger.info("serving", extra={"model": name, "worker_id": worker.worker_id})
            await worker.run(stopping)
        finally:
            await engine.close()
    finally:
        await index.close()
        await bus.close()


async def _unless_told(
    stopping: asyncio.Event, engine: Coroutine[None, None, EngineClient]
) -> EngineClient | None:
    """The engine with its weights loaded; None if the worker was told to stop meanwhile."""
    starting = asyncio.create_task(engine)
    told = asyncio.create_task(stopping.wait())
    await asyncio.wait((starting, told), return_when=asyncio.FIRST_COMPLETED)
    told.cancel()
    if starting.done():
        return starting.result()
    starting.cancel()
    await asyncio.wait((starting,))
    return None


def main() -> int:
    """Run until SIGTERM or SIGINT; the exit code, as ``bus.process`` says."""
    parser = argparse.ArgumentParser(prog="python -m workers", description=__doc__)
    parser.add_argument("--config", metavar="FILE", help="a TOML or YAML configuration file")
    arguments = parser.parse_args()

    def run() -> None:
        config = load_config(arguments.config, os.environ)
        configure_logging(config.worker.name, config.log_level)
        uvloop.run(serve(config))

    return exit_code_of("workers", run)


if __name__ == "__main__":
    sys.exit(main())

"""Command ``python -m millrace.scheduler [--config FILE]``: run one scheduler until SIGTERM."""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import sys
import uuid
from collections.abc import Callable
from functools import partial

import msgspec
import uvloop

from millrace.bus.fleet.directories import Directories
from millrace.bus.nats.permissions import Part
from millrace.bus.startup import enter
from millrace.bus.tenancy.keeper import LimitKeeper
from millrace.registry.catalogue import Catalogue, load_catalogue
from millrace.registry.catalogue_watch import CatalogueWatch
from millrace.registry.served import ServedModel
from millrace.runtime.clock import SystemClock
from millrace.runtime.faults.failures import keep_part_running
from millrace.runtime.logs import configure_logging
from millrace.runtime.metrics_server import Monitor, monitored
from millrace.runtime.process import exit_code_of, stop_event
from millrace.runtime.redis.link import RedisLink
from millrace.runtime.settings import load_config
from millrace.runtime.tracing_setup import open_tracing
from millrace.scheduler.intake.served_models import ModelCatalogue
from millrace.scheduler.jobs.tracing import JobTraces
from millrace.scheduler.metrics import SchedulerMetrics
from millrace.scheduler.scheduler import Scheduler
from millrace.schemas.config import Config
from millrace.schemas.errors import MillraceError

# Collect rarely: reference counts free most of a scheduler's objects.
_GC_THRESHOLDS = (50_000, 50, 100)
_LAST_SETTLEMENTS_S = 0.5

logger = logging.getLogger("millrace.scheduler")


async def serve(config: Config) -> None:
    """Run a scheduler until SIGTERM or SIGINT. Raises MillraceError."""
    stopping = stop_event()
    async with monitored("scheduler", config.metrics) as monitor:
        monitor.failures.on_giving_up = stopping.set
        await _schedule(config, stopping, monitor)
        monitor.failures.check()


async def _schedule(config: Config, stopping: asyncio.Event, monitor: Monitor) -> None:
    scheduler_id = config.scheduler.scheduler_id or f"scheduler-{uuid.uuid4().hex[:8]}"
    tracing = open_tracing(config.tracing, "scheduler", scheduler_id)
    clock = SystemClock()
    bus, index = await enter(config, scheduler_id, Part.SCHEDULER)
    redis = RedisLink(config.redis)
    limits = LimitKeeper(redis, config.gateway.tiers, clock, remembers=True)

    async def live(note_served: Callable[[], None]) -> None:
        if stopping.is_set():
            return
        read = load_catalogue(config.catalogue)
        catalogue = _with_models(read, config)
        models = tuple(catalogue.entry_for(model).name for model in config.scheduler.models)
        directories = Directories.of(redis, clock)
        scheduler = Scheduler(
            bus,
            msgspec.structs.replace(config.scheduler, models=models),
            clock,
            _offer(catalogue, config),
            index,
            None if tracing is None else JobTraces(tracing, clock),
            limits,
            directories,
        )
        scheduler.orphans.grace_s = config.gateway.orphan_grace_s
        metrics = SchedulerMetrics(scheduler)
        monitor.registry.register(metrics)
        monitor.models = lambda: scheduler.model_queues
        monitor.trouble = lambda: "" if bus.connected else "the message bus is unreachable"
        gc.unfreeze()  # Objects of an earlier run that failed may be frozen.
        gc.collect()
        gc.freeze()
        gc.set_threshold(*_GC_THRESHOLDS)
        logger.info(
            "ready", extra={"scheduler_id": scheduler_id, "models": list(scheduler.model_queues)}
        )
        watch = CatalogueWatch(config.catalogue, read, clock, partial(_follow, scheduler, config))
        try:
            watch.start()
            await directories.start()
            note_served()
            await scheduler.run(stopping)
        finally:
            await watch.close()
            await directories.close()
            monitor.registry.unregister(metrics)

    try:
        await keep_part_running("scheduler", live, clock)
    finally:
        await limits.close(_LAST_SETTLEMENTS_S)
        await redis.close()
        await index.close()
        await bus.close()
        if tracing is not None:
            await tracing.close()


def _with_models(catalogue: Catalogue, config: Config) -> Catalogue:
    """Add models that the configuration names by a path to the catalogue."""
    for model in config.scheduler.models:
        catalogue = catalogue.with_model(model)
    return catalogue


def _offer(catalogue: Catalogue, config: Config) -> ModelCatalogue:
    load = partial(
        ServedModel.load, catalogue, control_tokens_in_content=config.control_tokens_in_content
    )
    router = catalogue.router(config.scheduler.tiers)
    trusts_templates = config.gateway.trust_request_chat_template
    return ModelCatalogue(catalogue.names(), load, router, trusts_templates)


async def _follow(
    scheduler: Scheduler, config: Config, catalogue: Catalogue, changed: frozenset[str]
) -> None:
    """Apply a changed catalogue to the scheduler."""
    try:
        catalogue = _with_models(catalogue, config)
    except MillraceError as error:
        logger.warning("the catalogue was not reloaded", extra={"reason": error.message})
        return
    await scheduler.follow(_offer(catalogue, config), changed)


def main() -> int:
    """Run until SIGTERM or SIGINT and return the exit code (see ``runtime.process``)."""
    parser = argparse.ArgumentParser(prog="python -m millrace.scheduler", description=__doc__)
    parser.add_argument("--config", metavar="FILE", help="a TOML or YAML configuration file")
    arguments = parser.parse_args()

    def run() -> None:
        config = load_config(arguments.config, os.environ)
        configure_logging("scheduler", config.log_level)
        uvloop.run(serve(config))

    return exit_code_of("scheduler", run)


if __name__ == "__main__":
    sys.exit(main())

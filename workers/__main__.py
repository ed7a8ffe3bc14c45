"""``python -m millrace.workers [--config FILE]``: run one worker until SIGTERM or until its engine
fails.

On SIGTERM the worker hands its running requests to other workers or finishes them
(``drain_timeout_s``). A second SIGTERM returns them to the queue at once.

The worker's name (``worker.name``, or a random one) is exclusive: the worker does not start while
another worker of that name runs.

With a simulated engine, ``--count N`` runs N workers in this process, named worker-1-1 to
worker-1-N if the configuration says worker-1.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable

import uvloop
from msgspec.structs import replace

from millrace.bus.api import Bus
from millrace.bus.fleet.directory import RENEWAL_BEATS, WorkerName, new_worker_name
from millrace.bus.nats.permissions import Part
from millrace.bus.startup import enter
from millrace.bus.tenancy.settling import Settlements
from millrace.registry.catalogue import load_catalogue
from millrace.registry.served import ServedModel
from millrace.runtime.clock import Clock, SystemClock
from millrace.runtime.faults.failures import keep_part_running
from millrace.runtime.logs import configure_logging
from millrace.runtime.metrics_server import Monitor, monitored
from millrace.runtime.process import exit_code_of
from millrace.runtime.redis.link import RedisLink
from millrace.runtime.settings import load_config
from millrace.runtime.tasks import first_error, outcome_unless
from millrace.runtime.tracing_setup import open_tracing
from millrace.schemas.config import Config, WorkerConfig
from millrace.schemas.engines import QUANTIZATIONS, EngineKind
from millrace.schemas.errors import ConfigError, MillraceError, NameTakenError
from millrace.workers.engine_like import EngineLike, load_engine_class
from millrace.workers.host.metrics import WorkerMetrics
from millrace.workers.host.weights import check_weights
from millrace.workers.host.worker import Worker
from millrace.workers.process.engine_process import EngineClient
from millrace.workers.process.keeper import EngineKeeper
from millrace.workers.simulated.engine import SimulatedEngine

# Few, large collections: reference counts free most objects of the bus side.
_GC_THRESHOLDS = (50_000, 50, 100)
_LAST_SETTLEMENTS_S = 0.5
_GOODBYE_TIMEOUT_S = 1.0

logger = logging.getLogger("millrace.workers")


async def serve(config: Config, count: int = 1) -> None:
    """Load, serve and drain ``count`` workers. Raises MillraceError."""
    if count > 1 and config.worker.engine.kind is not EngineKind.SIMULATED:
        raise ConfigError(
            "--count needs a simulated engine: a real engine needs a process of its own."
        )
    stop = _ShutdownRequest()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.request)
    async with monitored("worker", config.metrics) as monitor:
        monitor.failures.on_giving_up = stop.request
        await _serve(config, count, stop, monitor)
        monitor.failures.check()


class _ShutdownRequest:
    """Shutdown request for the ``workers`` of this process: the first drains, the second forces.

    ``reason`` is the error that ended the workers, if it was not a signal.
    """

    def __init__(self) -> None:
        self.requested = asyncio.Event()
        self.reason: MillraceError | None = None
        self.workers: list[Worker] = []

    def request(self) -> None:
        if self.requested.is_set():
            for worker in self.workers:
                worker.force_shutdown()
        self.requested.set()


async def _serve(config: Config, count: int, stop: _ShutdownRequest, monitor: Monitor) -> None:
    catalogue = load_catalogue(config.catalogue).with_model(config.worker.model)
    name = catalogue.entry_for(config.worker.model).name
    served_model = await asyncio.to_thread(ServedModel.load, catalogue, name)
    engine_config = served_model.entry.engine_config(config.worker.engine)
    config = replace(config, worker=replace(config.worker, engine=engine_config))
    tracing = open_tracing(config.tracing, "worker", config.worker.name)
    bus, index = await enter(config, config.worker.name, Part.WORKER)
    clock = SystemClock()
    renew_s = RENEWAL_BEATS * config.worker.heartbeat_s
    own_name = WorkerName(bus.workers, clock, config.worker.name, renew_s)
    metrics = WorkerMetrics()
    monitor.registry.register(metrics)
    monitor.trouble = lambda: _trouble(bus, metrics, count)
    redis = RedisLink(config.redis)
    settlements = Settlements(redis, clock)

    async def make_worker(settings: WorkerConfig, engine: EngineKeeper) -> Worker:
        await check_weights(bus, name, engine.weights, clock.now_ns())
        worker = Worker(bus, settings, served_model, engine, clock, index, tracing, settlements)
        worker.orphans.grace_s = config.gateway.orphan_grace_s
        return worker

    try:
        async with asyncio.TaskGroup() as group:
            holding = group.create_task(_hold_name(own_name, stop), name="hold the name")
            running = [
                group.create_task(
                    _run_worker(settings, served_model, make_worker, stop, metrics, own_name),
                    name=settings.name,
                )
                for settings in _worker_configs(config.worker, count)
            ]
            await asyncio.wait(running)
            holding.cancel()
        if stop.reason is not None:
            raise stop.reason
    except* MillraceError as failed:
        raise first_error(failed) from None
    finally:
        await _release_name(own_name)
        await settlements.close(_LAST_SETTLEMENTS_S)
        await redis.close()
        await index.close()
        await bus.close()
        if tracing is not None:
            await tracing.close()


async def _hold_name(own_name: WorkerName, stop: _ShutdownRequest) -> None:
    """Claim the worker's name and renew it. End the workers in order if the name is lost later.

    Raises:
        NameTakenError: another worker has the name at the start.
    """
    await own_name.claim()
    try:
        await own_name.run()
    except NameTakenError as error:
        logger.warning("another worker took over the name", extra={"holder": error.holder})
        stop.reason = error
        stop.request()


async def _release_name(own_name: WorkerName) -> None:
    try:
        async with asyncio.timeout(_GOODBYE_TIMEOUT_S):
            await own_name.give_back()
    except (MillraceError, TimeoutError):
        logger.warning("the name could not be released; it expires in a moment")


def _worker_configs(config: WorkerConfig, count: int) -> list[WorkerConfig]:
    if count == 1:
        return [config]
    return [replace(config, name=f"{config.name}-{i}") for i in range(1, count + 1)]


async def _run_worker(
    config: WorkerConfig,
    served_model: ServedModel,
    make_worker: Callable[[WorkerConfig, EngineKeeper], Awaitable[Worker]],
    stop: _ShutdownRequest,
    metrics: WorkerMetrics,
    own_name: WorkerName,
) -> None:
    clock = SystemClock()
    start = _engine_starter(config, served_model, clock)

    async def live(note_served: Callable[[], None]) -> None:
        first = None
        if not stop.requested.is_set():
            first = await outcome_unless(stop.requested, start())
        if first is None:
            return
        engine = EngineKeeper(first, start, clock)
        worker: Worker | None = None
        try:
            await own_name.held.wait()
            worker = await make_worker(config, engine)
            stop.workers.append(worker)
            metrics.watch(config.name, served_model.entry.name, engine, worker)
            gc.unfreeze()  # objects of an earlier start that failed
            gc.collect()
            gc.freeze()
            gc.set_threshold(*_GC_THRESHOLDS)
            model = served_model.entry.name
            logger.info("serving", extra={"model": model, "worker_id": worker.worker_id})
            note_served()
            await worker.run(stop.requested)
        finally:
            if worker is not None:
                stop.workers.remove(worker)
                metrics.forget(worker)
            await engine.close()

    await keep_part_running(config.name, live, clock)


def _trouble(bus: Bus, metrics: WorkerMetrics, count: int) -> str:
    """Return why this process cannot accept requests now; empty if it can."""
    if metrics.num_workers < count:
        return "the engine is starting"
    if not bus.connected:
        return "the message bus is unreachable"
    return "draining" if metrics.all_drain else ""


def _engine_starter(
    config: WorkerConfig, served_model: ServedModel, clock: Clock
) -> Callable[[], Awaitable[EngineLike]]:
    async def start() -> EngineLike:
        if config.engine.kind is EngineKind.SIMULATED:
            return await SimulatedEngine.start(served_model, config.engine, clock)
        if config.engine.kind is EngineKind.CUSTOM:
            engine_class = load_engine_class(config.engine.command)
            return await engine_class.start(served_model, config.engine, clock)
        if config.engine.kind is EngineKind.REAL:
            gather_s = config.flush_interval_ms / 1e3
            return await EngineClient.start(served_model.path, config.engine, gather_s=gather_s)
        # Imported late: the server engines' modules take a third of a worker's start time and
        # memory.
        from millrace.workers.servers.starting import start_server_engine

        return await start_server_engine(served_model, config.engine, clock)

    return start


def main() -> int:
    """Run until SIGTERM or SIGINT and return the exit code, as ``runtime.process`` defines it."""
    parser = argparse.ArgumentParser(prog="python -m millrace.workers", description=__doc__)
    parser.add_argument("--config", metavar="FILE", help="a TOML or YAML configuration file")
    parser.add_argument(
        "--engine",
        choices=[kind.value for kind in EngineKind],
        help="the kind of engine; overrides engine.kind of the configuration",
    )
    parser.add_argument(
        "--quantization",
        choices=QUANTIZATIONS,
        help="the quantization; overrides engine.quantization of the configuration",
    )
    parser.add_argument(
        "--count",
        type=int,
        default=1,
        metavar="N",
        help="number of simulated workers in this process (default: 1)",
    )
    arguments = parser.parse_args()

    def run() -> None:
        config = load_config(arguments.config, os.environ)
        if arguments.count < 1:
            raise ConfigError("--count must be at least 1.")
        engine = config.worker.engine
        if arguments.engine is not None:
            engine = replace(engine, kind=EngineKind(arguments.engine))
        if arguments.quantization is not None:
            engine = replace(engine, quantization=arguments.quantization)
        config = replace(config, worker=replace(config.worker, engine=engine))
        if not config.worker.name:
            config = replace(config, worker=replace(config.worker, name=new_worker_name()))
        configure_logging(config.worker.name, config.log_level)
        uvloop.run(serve(config, arguments.count))

    return exit_code_of("workers", run)


if __name__ == "__main__":
    sys.exit(main())

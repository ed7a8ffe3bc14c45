"""Command ``python -m millrace.gateway [--config FILE]``: run one gateway process."""

from __future__ import annotations

import argparse
import asyncio
import datetime
import logging
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterable
from functools import partial

import uvloop
from msgspec.structs import replace

from millrace.bus.nats.permissions import Part
from millrace.bus.startup import enter
from millrace.gateway.core import Backends, Gateway, new_gateway_id
from millrace.gateway.models import LoadedModels
from millrace.gateway.server import Server, listen
from millrace.gateway.tools.catalogue import load_tools
from millrace.gateway.transport.certificate import certificate_of, front_url
from millrace.registry.catalogue import Catalogue, ModelEntry, load_catalogue
from millrace.registry.catalogue_watch import CatalogueWatch
from millrace.registry.routing.router import Router
from millrace.registry.served import ServedModel
from millrace.runtime.clock import SystemClock
from millrace.runtime.logs import configure_logging
from millrace.runtime.metrics_server import monitored
from millrace.runtime.process import exit_code_of, stop_event
from millrace.runtime.redis.link import RedisLink
from millrace.runtime.settings import load_config
from millrace.runtime.tasks import wait_unless_done
from millrace.runtime.tracing_setup import open_tracing
from millrace.schemas.config import Config, GatewayConfig
from millrace.schemas.errors import MillraceError
from millrace.schemas.models.cards import EngineCard, ModelCard

_log = logging.getLogger("millrace.gateway")


def main(argv: list[str] | None = None) -> int:
    """Run until SIGTERM or SIGINT; return the exit code of ``runtime.process``."""
    parser = argparse.ArgumentParser(prog="python -m millrace.gateway", description=__doc__)
    parser.add_argument("--config", metavar="FILE", help="a TOML or YAML configuration file")
    arguments = parser.parse_args(argv)

    def run() -> None:
        config = load_config(arguments.config, os.environ)
        configure_logging("gateway", config.log_level)
        _allow_many_sockets()
        uvloop.run(_run(config))

    return exit_code_of("gateway", run)


def _allow_many_sockets() -> None:
    """Raise the soft limit of open files to the hard limit: each client needs a file descriptor."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


async def _run(config: Config) -> None:
    catalogue = load_catalogue(config.catalogue)
    models = models_of(catalogue, config)
    tools = load_tools(config.gateway.tools, os.environ)
    if not config.gateway.gateway_id:
        named = replace(config.gateway, gateway_id=new_gateway_id())
        config = replace(config, gateway=named)
    tracing = open_tracing(config.tracing, "gateway", config.gateway.gateway_id)
    certificate_of(config.gateway)  # validates the certificate before anything starts
    listener = listen(config.gateway)
    try:
        name = f"gateway {config.gateway.gateway_id}".strip()
        bus, generations = await enter(config, name, Part.GATEWAY)
    except BaseException:
        listener.close()
        raise
    redis = RedisLink(config.redis)
    backends = Backends(bus, redis, generations)
    gateway = Gateway(backends, config, models, SystemClock(), tools=tools, tracing=tracing)
    server = Server(gateway, listener)
    follow = partial(_follow, gateway, config)
    watch = CatalogueWatch(config.catalogue, catalogue, SystemClock(), follow)
    shown = monitored("gateway", config.metrics, gateway.metrics.registry)
    stopped = stop_event()
    if server.certificate is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, server.certificate.reload)
    try:
        async with shown as monitor:
            monitor.trouble = lambda: _trouble(gateway)
            monitor.models = models.names
            monitor.failures.on_giving_up = stopped.set
            await _warm_up(models, catalogue, catalogue.names())
            watch.start()
            await _serve(server, stopped, config.gateway)
            monitor.failures.check()
    finally:
        await watch.close()
        await generations.close()
        await redis.close()
        await bus.close()
        if tracing is not None:
            await tracing.close()


def _trouble(gateway: Gateway) -> str:
    """Return why this gateway cannot take requests now; empty if it can."""
    if gateway.draining:
        return "draining"
    if not gateway.bus.connected:
        return "the message bus is unreachable"
    return "; ".join(f"{store} {why}" for store, why in gateway.stores.troubles().items())


async def _serve(server: Server, stopped: asyncio.Event, config: GatewayConfig) -> None:
    """Serve until ``stopped``, then drain."""
    serving = asyncio.create_task(server.serve())
    started = asyncio.create_task(server.wait_started())
    await asyncio.wait((serving, started), return_when=asyncio.FIRST_COMPLETED)
    started.cancel()
    if not serving.done():
        _log.info("ready", extra={"url": front_url(config, server.port)})
        await wait_unless_done(stopped, [serving])
    if not serving.done():
        _log.info("stopping", extra={"open_streams": server.num_streams})
        await server.stop(config.drain_timeout_s)
    await serving


async def _follow(
    gateway: Gateway, config: Config, catalogue: Catalogue, changed: frozenset[str]
) -> None:
    """Apply a changed catalogue."""
    models = gateway.models
    models.change(*_offer(catalogue, config), changed)
    gateway.metrics.know_models(models.names())
    await _warm_up(models, catalogue, changed.intersection(catalogue.names()))


async def _warm_up(models: LoadedModels, catalogue: Catalogue, names: Iterable[str]) -> None:
    """Load the tokenizers that are on this machine before the first request needs them."""
    for name in names:
        if not catalogue.get(name).is_local:
            continue
        try:
            await models.get(name)
        except MillraceError as error:
            _log.error("a model cannot be served", extra={"model": name, "why": error.message})


def models_of(catalogue: Catalogue, config: Config) -> LoadedModels:
    """Return the catalogue's models and routes, loadable by the gateway."""
    return LoadedModels(*_offer(catalogue, config))


def _offer(
    catalogue: Catalogue, config: Config
) -> tuple[dict[str, ModelCard], Callable[[str], ServedModel], Router]:
    cards = {name: _card(catalogue.get(name)) for name in catalogue.names()}
    load = partial(
        ServedModel.load, catalogue, control_tokens_in_content=config.control_tokens_in_content
    )
    return cards, load, catalogue.router(config.scheduler.tiers)


def _card(entry: ModelEntry) -> ModelCard:
    midnight = datetime.datetime.combine(entry.created, datetime.time(), datetime.UTC)
    return ModelCard(
        id=entry.name,
        created=int(midnight.timestamp()),
        max_model_len=entry.context_window_tokens,
        description=entry.description,
        engine=EngineCard.of(entry.engine_kind),
    )


if __name__ == "__main__":
    sys.exit(main())

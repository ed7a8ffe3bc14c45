"""The embedded stack: which processes make up Millrace on one machine, and when each is ready."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import msgspec
import yaml

from millrace.bus import nats as nats_bus
from millrace.bus.api import Bus
from millrace.cli.endpoints import CONFIG_FILE, Endpoints
from millrace.cli.local.autoscale import WorkerScaler
from millrace.cli.local.ports import PortPicker
from millrace.cli.local.private_files import credentials_of, make_private, write_private
from millrace.cli.local.probe import probe_pooling, serve_one
from millrace.cli.local.scrape_targets import (
    FILE_NAME,
    ScrapeTargets,
    TargetedProcesses,
    metrics_env,
)
from millrace.cli.local.server_files import nats_config, redis_config
from millrace.cli.local.store_recovery import StoreRecovery, with_folders
from millrace.cli.local.supervisor import Process, StartError, Supervisor, python
from millrace.runtime.binaries import nats_server_path, redis_server_path
from millrace.runtime.clock import SystemClock
from millrace.runtime.tasks import first_error
from millrace.schemas.config import Config, GatewayConfig, RedisConfig
from millrace.schemas.control import WorkerStatus

# For others on this machine that may read our files: addresses with passwords in them.
NATS_URL_FILE = "nats.url"
CLICKHOUSE_URL_FILE = "clickhouse.url"
_LOOPBACK = "127.0.0.1"
_NATS_USER = "millrace"
_NATS_ACCESS = (
    *("user", "password", "token", "nkey_seed", "creds_file"),
    *("ca_file", "certificate_file", "key_file"),
)
# What clients talk to is stopped first, one gateway after the other, as each hands its streams on.
_TELEMETRY, _SCHEDULERS, _WORKERS, _GATEWAYS = range(1, 5)
# Records can wait: an engine that shares its cores with them would make tokens more slowly.
_ANALYTICS_NICENESS = 10
# What a worker may take to end when it has drained.
_GOODBYE_S = 4.0


@dataclass(frozen=True)
class Plan:
    """What to run: ``models`` are catalogue names, each with ``num_workers`` workers at first, and
    then as many as the schedulers want if ``config`` has ``scheduler.autoscale.max_workers``.

    ``config`` is what the user set; the addresses in it are chosen when the stack starts.
    """

    data: Path
    config: Config
    models: tuple[str, ...]
    num_workers: int = 1
    num_gateways: int = 1
    num_schedulers: int = 1


@dataclass
class Stack:
    """Starts the servers, then the parts. The supervisor owns the processes; the stack owns the
    connection by which it sees whether a worker, also one that was restarted, is there."""

    plan: Plan
    supervisor: Supervisor
    say: Callable[[str], None] = print
    _bus: Bus | None = None
    _endpoints: Endpoints | None = None
    _statuses: dict[str, WorkerStatus] = field(default_factory=dict)
    _scaler: WorkerScaler | None = None
    _store_recovery: StoreRecovery | None = None
    _pickers: list[PortPicker] = field(default_factory=list)

    def __post_init__(self) -> None:
        config = self.plan.config
        self._targets = ScrapeTargets(
            self.plan.data / "run" / FILE_NAME, config.metrics, config.gateway.port
        )

    async def start(self) -> Endpoints:
        """Bring everything up and return once a request was really served. Raises StartError."""
        config = self._choose_addresses()
        self._write_config(config)
        await self._start_servers(config)
        self._bus = bus = await nats_bus.connect(config.nats, "millrace-up")
        await bus.workers.watch(self._note_worker)
        self._store_recovery = StoreRecovery(
            config.storage, bus.storage, self.supervisor.restart, SystemClock(), self.say
        )
        self._store_recovery.start()
        try:
            async with asyncio.TaskGroup() as group:
                records = group.create_task(self._start_records(config))
                group.create_task(self._start_parts(config))
        except* (StartError, OSError) as failed:
            raise first_error(failed) from None
        kafka = records.result()
        for model in self.plan.models:
            await serve_one(bus, model, probe_pooling(config, model))
        if config.scheduler.autoscale.max_workers:
            await self._start_scaling(bus, config.scheduler.autoscale.max_workers)
        store = _url(config.clickhouse.serve_host, config.clickhouse.serve_port)
        user = f"{quote(config.clickhouse.username)}:{quote(config.clickhouse.password, safe='')}"
        self._endpoints = Endpoints(
            http=_front_url(config.gateway),
            nats=config.nats.url,
            redis=config.redis.url,
            kafka=kafka,
            clickhouse=store.replace("://", f"://{user}@"),
        )
        self._write_endpoints(self._endpoints)
        return self._endpoints

    async def close(self) -> None:
        """Let go of the bus; the processes are the supervisor's to stop."""
        for name in ("endpoints.json", NATS_URL_FILE, CLICKHOUSE_URL_FILE):
            (self.plan.data / "run" / name).unlink(missing_ok=True)
        self._targets.close()
        for helper in (self._store_recovery, self._scaler):
            if helper is not None:
                await helper.close()
        if self._bus is not None:
            await self._bus.close()
        for picker in self._pickers:
            picker.close()

    def _choose_addresses(self) -> Config:
        wanted = self.plan.config
        front = PortPicker(host=wanted.gateway.host)
        gateway_port = front.pick("gateway", wanted.gateway.port)
        # What was asked for goes before what merely has a usual place.
        ports = PortPicker()
        replace = msgspec.structs.replace
        secret = credentials_of(self.plan.data)
        nats, redis = ports.pick("nats", 4222), ports.pick("redis", 6379)
        config = replace(
            wanted,
            # Our servers and no others: how somebody else's is reached does not count here.
            nats=replace(
                wanted.nats,
                **dict.fromkeys(_NATS_ACCESS, ""),
                url=f"nats://{_NATS_USER}:{secret.nats}@{_LOOPBACK}:{nats}",
            ),
            redis=RedisConfig(url=f"redis://:{secret.redis}@{_LOOPBACK}:{redis}/0"),
            clickhouse=replace(
                wanted.clickhouse,
                path=str(self.plan.data / "clickhouse"),
                password=wanted.clickhouse.password or secret.clickhouse,
                serve_host=_LOOPBACK,
                serve_port=ports.pick("clickhouse", wanted.clickhouse.serve_port),
            ),
            # Open streams may end before all stops; what then still runs at the workers is given
            # back to the queue, and goes on in the next life.
            gateway=replace(
                wanted.gateway,
                port=gateway_port,
                drain_timeout_s=min(3.0, wanted.gateway.drain_timeout_s),
            ),
            scheduler=replace(wanted.scheduler, models=self.plan.models),
            storage=with_folders(wanted.storage, self.plan.data),
        )
        self._pickers += (front, ports)
        for moved in ports.moved + front.moved:
            self.say(moved)
        return config

    async def _start_servers(self, config: Config) -> None:
        data = self.plan.data
        for name in ("nats", "redis", "clickhouse"):
            make_private(data / name)
        nats_port = _port_of(config.nats.url)
        self._write_run_file("nats.conf", nats_config(config.nats.url, data / "nats"))
        await self.supervisor.start(
            Process(
                name="nats",
                command=[str(nats_server_path()), "-c", str(data / "run" / "nats.conf")],
                ready=lambda: _listens(nats_port),
                start_timeout_s=30.0,
            )
        )
        redis_port = _port_of(config.redis.url)
        self._write_run_file("redis.conf", redis_config(config.redis.url, data / "redis"))
        await self.supervisor.start(
            Process(
                name="redis",
                command=[str(redis_server_path()), str(data / "run" / "redis.conf")],
                ready=lambda: _listens(redis_port),
                start_timeout_s=30.0,
            )
        )

    async def _start_kafka(self) -> str:
        """The in-memory cluster picks its own ports, so a new life has a new address."""
        file = self.plan.data / "run" / "kafka.bootstrap"

        async def ready() -> bool:
            return file.exists() and file.stat().st_size > 0

        async def follow() -> None:
            config, address = self._read_config(), file.read_text().strip()
            kafka = msgspec.structs.replace(config.kafka, bootstrap_servers=address)
            self._write_config(msgspec.structs.replace(config, kafka=kafka))
            if self._endpoints is not None:
                self._endpoints = msgspec.structs.replace(self._endpoints, kafka=address)
                self._write_endpoints(self._endpoints)
            await self.supervisor.restart("telemetry-1")

        await self.supervisor.start(
            Process(
                name="kafka",
                command=python("millrace.telemetry.kafka.embedded", "--write-bootstrap", str(file)),
                ready=ready,
                before_start=lambda: file.unlink(missing_ok=True),
                on_restart=follow,
                niceness=_ANALYTICS_NICENESS,
            )
        )
        return file.read_text().strip()

    async def _start_records(self, config: Config) -> str:
        """What keeps records; the address of Kafka, of which the other parts know nothing."""
        address = await self._start_kafka()
        kafka = msgspec.structs.replace(config.kafka, bootstrap_servers=address, partitions=1)
        self._write_config(msgspec.structs.replace(config, kafka=kafka))
        clickhouse = _url(config.clickhouse.serve_host, config.clickhouse.serve_port)
        telemetry = self._part(
            "telemetry-1",
            "telemetry",
            ready=lambda: _answers(f"{clickhouse}/ping"),
            stage=_TELEMETRY,
            niceness=_ANALYTICS_NICENESS,
        )
        await self.supervisor.start(telemetry)
        return address

    async def _start_parts(self, config: Config) -> None:
        """All at once, since each loads for a while."""
        parts = [
            self._part(f"scheduler-{i}", "scheduler", stage=_SCHEDULERS)
            for i in range(1, self.plan.num_schedulers + 1)
        ]
        parts += [self._worker(name, model) for name, model in self._first_workers()]
        health = _front_url(config.gateway) + "/healthz"
        for i in range(1, self.plan.num_gateways + 1):
            name = f"gateway-{i}"
            parts.append(
                self._part(
                    name,
                    "gateway",
                    env={"MILLRACE_GATEWAY__GATEWAY_ID": name},
                    ready=lambda name=name: _answers(health, gateway=name),
                    stop_timeout_s=5.0,
                    stage=_GATEWAYS + i,
                )
            )
        await asyncio.gather(*(self.supervisor.start(part) for part in parts))

    def _first_workers(self) -> list[tuple[str, str]]:
        """Names, each with a model."""
        models = (model for model in self.plan.models for _ in range(self.plan.num_workers))
        return [(f"worker-{i}", model) for i, model in enumerate(models, start=1)]

    def _worker(self, name: str, model: str) -> Process:
        return self._part(
            name,
            "workers",
            env={"MILLRACE_WORKER__NAME": name, "MILLRACE_WORKER__MODEL": model},
            ready=lambda: self._worker_is_there(name),
            start_timeout_s=600.0,
            stop_timeout_s=self.plan.config.worker.drain_timeout_s + _GOODBYE_S,
            force_after_s=1.0,
            stage=_WORKERS,
        )

    async def _start_scaling(self, bus: Bus, max_workers: int) -> None:
        self._scaler = WorkerScaler(
            TargetedProcesses(self.supervisor, self._targets),
            self._worker,
            self._num_held,
            max_workers,
            SystemClock(),
            self.say,
        )
        for name, model in self._first_workers():
            self._scaler.adopt(name, model)
        await bus.control.subscribe_queue_status(self._scaler.on_queue)

    def _num_held(self, name: str) -> int:
        status = self._statuses.get(name)
        return 0 if status is None else status.num_running + status.num_waiting

    def _part(self, name: str, package: str, **options: Any) -> Process:
        config_file = str(self.plan.data / "run" / CONFIG_FILE)
        port = self._targets.add(name, package.removesuffix("s"))
        env = {"OMP_WAIT_POLICY": "PASSIVE", **metrics_env(port), **options.pop("env", {})}
        return Process(
            name=name, command=python(package, "--config", config_file), env=env, **options
        )

    def _note_worker(self, status: WorkerStatus) -> None:
        self._statuses[status.name] = status

    async def _worker_is_there(self, name: str) -> bool:
        status = self._statuses.get(name)
        pid_file = self.plan.data / "run" / f"{name}.pid"
        return (
            status is not None
            and not status.retired
            and status.started_ns >= pid_file.stat().st_mtime_ns
        )

    def _write_endpoints(self, endpoints: Endpoints) -> None:
        encoded = msgspec.json.format(msgspec.json.encode(endpoints), indent=2)
        self._write_run_file(NATS_URL_FILE, endpoints.nats + "\n")
        self._write_run_file(CLICKHOUSE_URL_FILE, endpoints.clickhouse + "\n")
        self._write_run_file("endpoints.json", encoded.decode() + "\n")

    def _write_config(self, config: Config) -> None:
        tree = msgspec.to_builtins(config)
        self._write_run_file(CONFIG_FILE, yaml.safe_dump(tree, sort_keys=False))

    def _read_config(self) -> Config:
        return msgspec.yaml.decode((self.plan.data / "run" / CONFIG_FILE).read_bytes(), type=Config)

    def _write_run_file(self, name: str, text: str) -> None:
        """Whole or not at all: a restarting part may read it at any moment."""
        write_private(self.plan.data / "run" / name, text)


async def _listens(port: int) -> bool:
    try:
        _reader, writer = await asyncio.open_connection(_LOOPBACK, port)
    except OSError:
        return False
    writer.close()
    return True


def _any_certificate() -> ssl.SSLContext:
    """Nothing is told to our own parts: whether the certificate suits the name by which others know
    this machine is not asked here."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


async def _answers(url: str, gateway: str | None = None) -> bool:
    """Whether a GET says 200, and the gateway of that name said it."""

    def get() -> bool:
        try:
            with urllib.request.urlopen(  # noqa: S310 (our own address)
                url, timeout=2.0, context=_any_certificate() if url.startswith("https:") else None
            ) as answer:
                return gateway is None or json.loads(answer.read()).get("gateway_id") == gateway
        except (OSError, urllib.error.URLError, ValueError):
            return False

    return await asyncio.to_thread(get)


def _port_of(url: str) -> int:
    port = urlsplit(url).port
    assert port is not None
    return port


def _front_url(gateway: GatewayConfig) -> str:
    url = _url(gateway.host, gateway.port)
    return url.replace("http://", "https://", 1) if gateway.certificate_file else url


def _url(host: str, port: int) -> str:
    """An address that a local client can open, also for a server that listens on all."""
    everywhere = ipaddress.ip_address(host).is_unspecified if _is_ip(host) else False
    shown = _LOOPBACK if everywhere else f"[{host}]" if ":" in host else host
    return f"http://{shown}:{port}"


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True

"""Embedded stack: the processes of Millrace on one machine, and their readiness checks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec

from millrace.bus import nats as nats_bus
from millrace.bus.fleet.adapters import AdapterStore
from millrace.bus.fleet.role_shares import RoleShares
from millrace.bus.nats.permissions import Part
from millrace.cli.endpoints import CONFIG_FILE, ENDPOINTS_FILE, LOOPBACK, Endpoints, url
from millrace.cli.json_files import formatted_json
from millrace.cli.local.live import (
    LiveSystem,
    StartingModels,
    SystemState,
    probe_pooling,
    serve_one,
)
from millrace.cli.local.models import KNOWN_FILE
from millrace.cli.local.ports import PortPicker, answers, front_url, listens, port_of
from millrace.cli.local.private_files import (
    credentials_of,
    make_private,
    nats_config,
    redis_config,
    remove_access_files,
    write_access_files,
    write_private,
)
from millrace.cli.local.records.kafka_servers import NICENESS, kafka_server
from millrace.cli.local.records.record_keeping import (
    KAFKA,
    START_TIMEOUT_S,
    TELEMETRY,
    RecordKeeping,
    WorkerLosses,
)
from millrace.cli.local.scrape_targets import (
    FILE_NAME,
    ScrapeTargets,
    TargetedProcesses,
    metrics_env,
)
from millrace.cli.local.store_recovery import StoreRecovery, with_folders
from millrace.cli.local.supervisor import Process, Supervisor
from millrace.cli.local.worker_pool import WorkerPool
from millrace.runtime.binaries import nats_server_path, redis_server_path
from millrace.runtime.clock import SystemClock
from millrace.runtime.process import python_command
from millrace.runtime.redis.link import RedisLink
from millrace.schemas.config import Config, RedisConfig
from millrace.schemas.engines import WorkerRole
from millrace.schemas.models.adapters import Adapter
from millrace.telemetry.kafka.apache.broker import KafkaProgram

_NATS_USER = "millrace"
_NATS_ACCESS = (
    *("user", "password", "token", "nkey_seed", "creds_file"),
    *("ca_file", "certificate_file", "key_file"),
)
# Order of the stop, from the highest stage down. Gateways stop first, one after the other, as each
# hands over its streams.
_TELEMETRY, _SCHEDULERS, _WORKERS, _GATEWAYS = range(1, 5)
# Time to wait for records after the start in seconds, so that commands that read them usually work
# from the start.
_RECORDS_GRACE_S = 10.0
# Time for a worker to end after draining, in seconds.
_GOODBYE_S = 4.0
# Resets the engine of all models, so that the catalogue's entry of a model sets its engine.
_OWN_ENGINE = {
    "MILLRACE_WORKER__ENGINE__KIND": "real",
    "MILLRACE_WORKER__ENGINE__URL": "",
    "MILLRACE_WORKER__ENGINE__COMMAND": "",
    "MILLRACE_WORKER__ENGINE__ARGUMENTS": "",
    "MILLRACE_WORKER__ENGINE__SERVED_NAME": "",
}


@dataclass(frozen=True)
class Plan:
    """Configuration of a run. ``models`` are catalogue names, each with ``num_workers`` workers at
    first. If ``config`` has ``scheduler.autoscale.max_workers``, the schedulers then set the
    number.

    ``roles`` are the roles of a model's first workers, and give the shares for further workers;
    workers of added models have both roles. ``config`` is the user's; its addresses are chosen when
    the stack starts. ``port_is_fixed``: the gateway must use its configured port. ``serving`` holds
    the models and the catalogue for further models. ``adapters`` are offered from the start, beside
    those added earlier. ``kafka`` is the program of Apache Kafka; None: its stand-in runs.
    """

    data: Path
    config: Config
    models: tuple[str, ...]
    serving: StartingModels
    port_is_fixed: bool = False
    num_workers: int = 1
    roles: tuple[WorkerRole, ...] = ()
    num_gateways: int = 1
    num_schedulers: int = 1
    adapters: tuple[Adapter, ...] = ()
    kafka: KafkaProgram | None = None


@dataclass
class Stack:
    """Starter of the servers, then of the parts. The supervisor owns the processes; the stack owns
    the bus connection through which it sees started and restarted workers."""

    plan: Plan
    supervisor: Supervisor
    say: Callable[[str], None] = print
    system_state: SystemState = field(default_factory=SystemState)
    _store_recovery: StoreRecovery | None = None
    _pickers: list[PortPicker] = field(default_factory=list)

    def __post_init__(self) -> None:
        config = self.plan.config
        self._targets = ScrapeTargets(
            self.plan.data / "run" / FILE_NAME, config.metrics, config.gateway.port
        )
        processes = TargetedProcesses(self.supervisor, self._targets)
        self._pool = WorkerPool(processes, self._worker, self.plan.data / "run", self.say)
        self.live = LiveSystem(
            self.plan.data,
            config,
            self.plan.serving,
            self.supervisor,
            self._targets,
            self._pool,
            self.system_state,
            self.say,
        )
        self._losses = WorkerLosses(self._pool.status)
        self.records = RecordKeeping(
            self.supervisor,
            self.system_state,
            self._read_config,
            self._write_config,
            self._write_endpoints,
            SystemClock(),
            self.say,
        )

    async def start(self) -> Endpoints:
        """Start everything that serving needs; return once a request was served. ``records`` may
        come later.

        Raises StartError.
        """
        config = self._choose_addresses()
        self._write_config(config)
        self.live.changes.write()
        await self._start_servers(config)
        await self._offer_adapters(config)
        # The stack creates the streams itself, as a scheduler does, since it owns the NATS server.
        bus = await nats_bus.connect(config.nats, "millrace-up", part=Part.SCHEDULER)
        self.system_state.bus = bus
        await bus.workers.watch(self._pool.note)
        self.supervisor.on_lost = partial(self._losses.note, bus)
        self._store_recovery = StoreRecovery(
            config.storage, bus.storage, self.supervisor.restart, SystemClock(), self.say
        )
        self._store_recovery.start()
        self.records.start(self._kafka, self._telemetry(config))
        await self._start_parts(config)
        for model in self.plan.models:
            await serve_one(bus, model, probe_pooling(config, model))
        if config.scheduler.autoscale.is_on:
            await self._pool.start_scaling(bus, config.scheduler.autoscale.max_workers)
        store = url(config.clickhouse.serve_host, config.clickhouse.serve_port)
        who = (config.clickhouse.username, config.clickhouse.password)
        user = ":".join(quote(text, safe="") for text in who)
        self.system_state.endpoints = Endpoints(
            http=front_url(config.gateway),
            nats=config.nats.url,
            redis=config.redis.url,
            kafka=self.system_state.addresses.get(KAFKA, ""),
            clickhouse=store.replace("://", f"://{user}@"),
        )
        self._write_endpoints(self.system_state.endpoints)
        self.system_state.phase = "running"
        await self.records.wait(_RECORDS_GRACE_S)
        return self.system_state.endpoints

    async def close(self) -> None:
        """Close the bus connection; the supervisor stops the processes."""
        self.system_state.phase = "stopping"
        (self.plan.data / "run" / ENDPOINTS_FILE).unlink(missing_ok=True)
        remove_access_files(self.plan.data / "run")
        self._targets.close()
        await self.records.close()
        if self._store_recovery is not None:
            await self._store_recovery.close()
        await self._losses.close()
        await self._pool.close()
        if self.system_state.bus is not None:
            await self.system_state.bus.close()
        for picker in self._pickers:
            picker.close()

    def _choose_addresses(self) -> Config:
        wanted = self.plan.config
        front = PortPicker(host=wanted.gateway.host)
        gateway_port = _front_port(front, wanted.gateway.port, is_fixed=self.plan.port_is_fixed)
        if wanted.gateway.port == 0:
            self._targets.gateway_port = gateway_port
        # Requested ports are claimed before default ports.
        ports = PortPicker()
        replace = msgspec.structs.replace
        secret = credentials_of(self.plan.data)
        nats, redis = ports.pick("nats", 4222), ports.pick("redis", 6379)
        config = replace(
            wanted,
            # Only servers of this stack are used, so the user's access settings do not apply.
            nats=replace(
                wanted.nats,
                **dict.fromkeys(_NATS_ACCESS, ""),
                url=f"nats://{_NATS_USER}:{secret.nats}@{LOOPBACK}:{nats}",
            ),
            redis=RedisConfig(url=f"redis://:{secret.redis}@{LOOPBACK}:{redis}/0"),
            clickhouse=replace(
                wanted.clickhouse,
                path=str(self.plan.data / "clickhouse"),
                password=wanted.clickhouse.password or secret.clickhouse,
                serve_host=LOOPBACK,
                serve_port=ports.pick("clickhouse", wanted.clickhouse.serve_port),
            ),
            # Open streams may finish during the stop. Requests that still run at the workers then
            # go back to the queue and continue after the next start.
            gateway=replace(
                wanted.gateway,
                port=gateway_port,
                drain_timeout_s=min(3.0, wanted.gateway.drain_timeout_s),
            ),
            # Schedule all models of the catalogue at any time.
            scheduler=replace(wanted.scheduler, models=()),
            storage=with_folders(
                wanted.storage, self.plan.data, keeps_kafka=self.plan.kafka is not None
            ),
        )
        self._kafka = kafka_server(self.plan.data, self.plan.kafka, ports)
        self._pickers += (front, ports)
        store = f"{LOOPBACK}:{config.clickhouse.serve_port}"
        self.system_state.addresses |= {
            "nats": f"{LOOPBACK}:{nats}",
            "redis": f"{LOOPBACK}:{redis}",
            TELEMETRY: store,
        }
        for i in range(1, self.plan.num_gateways + 1):
            self.system_state.addresses[f"gateway-{i}"] = f"{wanted.gateway.host}:{gateway_port}"
        for moved in ports.moved + front.moved:
            self.say(moved)
        return config

    async def _start_servers(self, config: Config) -> None:
        data = self.plan.data
        for name in ("nats", "redis"):
            make_private(data / name)
        nats_port = port_of(config.nats.url)
        self._write_run_file("nats.conf", nats_config(config.nats.url, data / "nats"))
        await self.supervisor.start(
            Process(
                name="nats",
                command=[str(nats_server_path()), "-c", str(data / "run" / "nats.conf")],
                ready=lambda: listens(nats_port),
                start_timeout_s=30.0,
            )
        )
        redis_port = port_of(config.redis.url)
        self._write_run_file("redis.conf", redis_config(config.redis.url, data / "redis"))
        await self.supervisor.start(
            Process(
                name="redis",
                command=[str(redis_server_path()), str(data / "run" / "redis.conf")],
                ready=lambda: listens(redis_port),
                start_timeout_s=30.0,
            )
        )

    def _telemetry(self, config: Config) -> Process:
        clickhouse = url(config.clickhouse.serve_host, config.clickhouse.serve_port)
        return self._part(
            TELEMETRY,
            "telemetry",
            ready=lambda: answers(f"{clickhouse}/ping"),
            before_start=lambda: make_private(self.plan.data / "clickhouse"),
            stage=_TELEMETRY,
            start_timeout_s=START_TIMEOUT_S,
            niceness=NICENESS,
        )

    async def _offer_adapters(self, config: Config) -> None:
        link = RedisLink(config.redis)
        try:
            for adapter in self.plan.adapters:
                await AdapterStore(link).add(adapter, replace=True)
        finally:
            await link.close()

    async def _start_parts(self, config: Config) -> None:
        """Start all parts at once, since each takes a while to load."""
        parts = [
            self._part(f"scheduler-{i}", "scheduler", env=self._known_catalogue, stage=_SCHEDULERS)
            for i in range(1, self.plan.num_schedulers + 1)
        ]
        parts += self._first_workers()
        health = front_url(config.gateway) + "/healthz"
        for i in range(1, self.plan.num_gateways + 1):
            name = f"gateway-{i}"
            parts.append(
                self._part(
                    name,
                    "gateway",
                    env={"MILLRACE_GATEWAY__GATEWAY_ID": name},
                    ready=lambda name=name: answers(health, gateway=name),
                    stop_timeout_s=5.0,
                    stage=_GATEWAYS + i,
                )
            )
        await asyncio.gather(*(self.supervisor.start(part) for part in parts))

    def _first_workers(self) -> list[Process]:
        shares = RoleShares(self.plan.roles, self.plan.config.scheduler.switch_roles)
        return [
            process
            for model in self.plan.models
            for process in self._pool.new_workers(
                model, self.live.changes.num_workers(model), shares
            )
        ]

    def _worker(self, name: str, model: str, role: WorkerRole = WorkerRole.BOTH) -> Process:
        env = {"MILLRACE_WORKER__NAME": name, "MILLRACE_WORKER__MODEL": model}
        if role is not WorkerRole.BOTH:
            env["MILLRACE_WORKER__ROLE"] = role
        if self.live.changes.runs_by_itself(model):
            env |= _OWN_ENGINE
        return self._part(
            name,
            "workers",
            env=env | self._known_catalogue,
            ready=lambda: self._pool.is_there(name),
            start_timeout_s=600.0,
            stop_timeout_s=self.plan.config.worker.drain_timeout_s + _GOODBYE_S,
            force_after_s=1.0,
            stage=_WORKERS,
        )

    @property
    def _known_catalogue(self) -> dict[str, str]:
        """Return the variable that gives a part the catalogue with models that are being added or
        removed."""
        return {"MILLRACE_CATALOGUE": str(self.plan.data / "run" / KNOWN_FILE)}

    def _part(self, name: str, package: str, **options: Any) -> Process:
        config_file = str(self.plan.data / "run" / CONFIG_FILE)
        port = self._targets.add(name, package.removesuffix("s"))
        env = {"OMP_WAIT_POLICY": "PASSIVE", **metrics_env(port), **options.pop("env", {})}
        command = python_command(f"millrace.{package}", "--config", config_file)
        return Process(name=name, command=command, env=env, **options)

    def _write_endpoints(self, endpoints: Endpoints) -> None:
        write_access_files(self.plan.data / "run", endpoints)
        self._write_run_file(ENDPOINTS_FILE, formatted_json(endpoints))

    def _write_config(self, config: Config) -> None:
        self._write_run_file(CONFIG_FILE, msgspec.yaml.encode(config).decode())

    def _read_config(self) -> Config:
        return msgspec.yaml.decode((self.plan.data / "run" / CONFIG_FILE).read_bytes(), type=Config)

    def _write_run_file(self, name: str, text: str) -> None:
        """Write a file atomically, since a restarting part may read it at any moment."""
        write_private(self.plan.data / "run" / name, text)


def _front_port(picker: PortPicker, wanted: int, *, is_fixed: bool) -> int:
    """Return the gateway's port; 0 asks for any free port."""
    if wanted == 0:
        return picker.pick_any("gateway")
    if is_fixed:
        return picker.pick_exactly("gateway", wanted)
    return picker.pick("gateway", wanted)

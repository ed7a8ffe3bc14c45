"""State of a local system for ``millrace status``."""

from __future__ import annotations

import asyncio
import json
import urllib.error
from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple

from millrace.cli.local.control import PartReport
from millrace.cli.local.machine_memory import memory_of_session
from millrace.cli.local.supervisor import PartView
from millrace.runtime.addresses import open_directly
from millrace.runtime.process import how_it_ended
from millrace.schemas.control import WorkerStatus

_ANSWERS_WITHIN_S = 2.0
_SILENT = "does not answer"


class PartHealth(NamedTuple):
    """Health of a part: ``ok`` or a description of the problem, and the models that it knows."""

    status: str
    models: frozenset[str] = frozenset()

    @property
    def answers(self) -> bool:
        """True if the part answered."""
        return self.status != _SILENT


async def health_at(address: str) -> PartHealth:
    """Return the health of the process with its metrics at host:port."""

    def get() -> PartHealth:
        try:
            with open_directly(f"http://{address}/healthz", timeout_s=_ANSWERS_WITHIN_S) as answer:
                body = answer.read()
        except urllib.error.HTTPError as error:
            body = error.read()
        except OSError:
            return PartHealth(_SILENT)
        try:
            told = json.loads(body)
            return PartHealth(str(told["status"]), frozenset(told.get("models", ())))
        except (ValueError, KeyError, TypeError):
            return PartHealth(_SILENT)

    return await asyncio.to_thread(get)


async def part_reports(
    parts: list[PartView],
    metrics: Mapping[str, str],
    addresses: Mapping[str, str],
    worker_status: Callable[[str], WorkerStatus | None],
) -> tuple[PartReport, ...]:
    """Ask all parts concurrently. ``metrics`` and ``addresses`` have host:port by name."""

    async def report(part: PartView) -> PartReport:
        name = part.process.name
        status = worker_status(name)
        return PartReport(
            name=name,
            pid=part.pid,
            up_s=part.up_s,
            restarts=part.num_restarts,
            memory_bytes=await asyncio.to_thread(memory_of_session, part.pid),
            health=await _health_of(part, metrics.get(name)),
            address=addresses.get(name),
            metrics=metrics.get(name),
            model=None if status is None else status.model,
            num_requests=None if status is None else status.num_running + status.num_waiting,
            num_devices=1 if status is None else status.num_devices,
        )

    return tuple(await asyncio.gather(*map(report, parts)))


async def _health_of(part: PartView, metrics: str | None) -> str:
    if part.code is not None:
        return f"ended ({how_it_ended(part.code)})"
    if not part.is_ready:
        return "starting"
    if metrics is not None:
        return (await health_at(metrics)).status
    ready: Callable[[], Awaitable[bool]] | None = part.process.ready
    return "ok" if ready is None or await ready() else _SILENT

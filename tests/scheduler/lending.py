"""Workers from which others can pull blocks, and their statuses."""

from __future__ import annotations

from collections.abc import Sequence

from millrace.bus.memory import MemoryBus
from millrace.schemas.control import PrefixReport
from millrace.schemas.prefix import REPORTED_BYTES, extend_keys, root_key
from tests.scheduler.scripted_worker import ScriptedWorker
from tests.scheduler.world import World

LONG = tuple(range(1, 401))
"""A prompt that is worth moving."""


async def serving(world: World, name: str, num_slots: int = 4) -> ScriptedWorker:
    """Add a worker from which others can pull blocks."""
    worker = await world.add_worker(name, num_slots)
    worker.hand_over_blocks()
    await worker.announce()
    return worker


async def tell_cached(
    world: World,
    worker: ScriptedWorker,
    token_ids: Sequence[int],
    *,
    num_blocks: int,
    number: int = 1,
) -> None:
    """The worker's report of that number: so many blocks of these tokens are all that it has."""
    keys: list[bytes] = []
    extend_keys(keys, root_key(""), token_ids, num_blocks=num_blocks, block_size_tokens=16)
    report = PrefixReport(
        worker_id=worker.worker_id,
        model="m",
        number=number,
        whole=True,
        added=b"".join(key[:REPORTED_BYTES] for key in keys),
    )
    await MemoryBus(world.broker).workers.report_prefixes(report)

"""Selection of the batches that this gateway runs: batches without an owner, as capacity permits,
shared fairly between tenants.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple

from millrace.bus import redis_keys
from millrace.bus.store.objects import JournalConflictError
from millrace.gateway.batches.files import created_ms
from millrace.gateway.batches.lines import (
    BatchEndpoint,
    EmbeddingBatchEndpoint,
    GenerationBatchEndpoint,
)
from millrace.gateway.batches.run import BatchRun
from millrace.gateway.batches.store import BatchStore
from millrace.gateway.core import Gateway
from millrace.gateway.endpoints import Endpoint
from millrace.gateway.errors import NotFoundError
from millrace.runtime.clock import until_beat_s
from millrace.runtime.redis.link import RedisLink, RedisUnreachableError, Script
from millrace.runtime.tasks import Tasks, wait_or_sleep
from millrace.schemas.errors import BusUnavailableError, MillraceError

logger = logging.getLogger(__name__)

_RENEWALS_PER_LEASE = 4
# While no gateway has a batch, look for batches only every this many intervals: the gateway's own
# batches are announced to it.
_REST_SCANS = 5
_MS_PER_S = 1_000
_NS_PER_MS = 1_000_000
# A batch without state after this long was never created: its gateway died midway.
_UNBORN_MS = 60_000

# KEYS: the lease. ARGV: the holder, and its duration in ms. Returns 0 if another holder has it.
_RENEW = Script(
    """
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
"""
)
# KEYS: the lease. ARGV: the holder. Releases the lease if this holder has it.
RELEASE = Script(
    """
if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end
return 0
"""
)


class _Running(NamedTuple):
    tenant: str
    run: BatchRun
    task: asyncio.Task[None]


class BatchRunner:
    """Runner of this gateway's batches. Without Redis it runs none.

    A lease in Redis names the owner of a batch, so that one gateway at a time runs it. If two
    gateways believe they own it, the batch's log takes the entries of only one.
    """

    def __init__(self, gateway: Gateway, endpoints: Sequence[Endpoint]) -> None:
        """Create a runner; ``endpoints`` answer with generations."""
        self._gateway = gateway
        self._store = BatchStore(gateway.bus.journal)
        self._kinds: dict[str, BatchEndpoint] = {
            endpoint.route: GenerationBatchEndpoint(gateway, endpoint) for endpoint in endpoints
        }
        self._kinds[EmbeddingBatchEndpoint.route] = EmbeddingBatchEndpoint(gateway)
        self._holder = f"{gateway.gateway_id}/{secrets.token_hex(8)}"
        self._runs: dict[str, _Running] = {}
        self._tasks = Tasks()

    @property
    def num_running(self) -> int:
        """Return the number of batches that this gateway runs."""
        return len(self._runs)

    async def start(self) -> None:
        link = self._gateway.redis
        if link is not None:
            config, clock = self._gateway.config, self._gateway.clock
            renew = partial(self._renew, link)
            renewal_s = config.batch_lease_s / _RENEWALS_PER_LEASE
            self._tasks.keep(partial(self._scan_on, link), clock, "look for batches")
            self._tasks.repeat(renew, renewal_s, clock, "renew the leases of batches")

    async def close(self) -> None:
        """Stop, write the logs, and leave the batches to other gateways."""
        await self._tasks.close()
        await self._leave(list(self._runs))

    async def _leave(self, batch_ids: Sequence[str]) -> None:
        """Stop running these batches, write their logs, and release them to other gateways."""
        left = {batch_id: self._runs.pop(batch_id) for batch_id in batch_ids}
        for running in left.values():
            running.task.cancel()
        await asyncio.gather(*(running.task for running in left.values()), return_exceptions=True)
        for batch_id, running in left.items():
            try:
                await running.run.flush()
                await self._release(batch_id)
            except MillraceError as error:
                logger.warning(
                    "a batch was left without writing its log",
                    extra={"batch_id": batch_id, "cause": error.message},
                )

    async def _scan_on(self, link: RedisLink) -> None:
        gateway = self._gateway
        while True:
            gateway.has_new_batch.clear()
            num_waiting = await self._scan(link)
            num_intervals = 1 if num_waiting or self._runs else _REST_SCANS
            sleep_s = until_beat_s(gateway.clock, num_intervals * gateway.config.batch_scan_s)
            await wait_or_sleep(gateway.has_new_batch, gateway.clock, sleep_s)

    async def _scan(self, link: RedisLink) -> int:
        """Return the number of batches without an owner; 1 if it is unknown."""
        try:
            return await self._look_for_batches(link)
        except (RedisUnreachableError, BusUnavailableError) as error:
            logger.debug(
                "looking for batches failed; retrying later", extra={"cause": error.message}
            )
        return 1

    async def _look_for_batches(self, link: RedisLink) -> int:
        waiting = [one for one in await self._store.open_batches() if one[1] not in self._runs]
        tenants = [running.tenant for running in self._runs.values()]
        for tenant, batch_id in in_turn(waiting, tenants):
            is_full = len(self._runs) >= self._gateway.config.max_batches_at_once
            other = self._to_leave_for(tenant) if is_full else None
            if is_full and other is None:
                break
            key = redis_keys.batch_lease_key(batch_id)
            if await link.call("SET", key, self._holder, "NX", "PX", self._lease_ms):
                self._begin(tenant, batch_id)
                if other is not None:
                    await self._leave([other])
        return len(waiting)

    def _to_leave_for(self, tenant: str) -> str | None:
        """Return a batch to release so that ``tenant`` gets a place: the newest batch of the tenant
        with the most places here. Batches that wait for their tenant's limits must not keep others
        out.
        """
        places = Counter(running.tenant for running in self._runs.values())
        greediest = max(places, key=places.__getitem__, default=tenant)
        if places[greediest] <= places[tenant] + 1:
            return None
        return max(
            batch_id for batch_id, running in self._runs.items() if running.tenant == greediest
        )

    def _begin(self, tenant: str, batch_id: str) -> None:
        run = BatchRun(self._gateway, self._store, self._kinds, tenant, batch_id)
        task = self._tasks.spawn(self._run(run, tenant, batch_id), "run a batch")
        self._runs[batch_id] = _Running(tenant, run, task)

    async def _run(self, run: BatchRun, tenant: str, batch_id: str) -> None:
        try:
            await run.run()
        except NotFoundError:
            await self._forget_unborn(tenant, batch_id)
        except JournalConflictError:
            logger.warning("another gateway runs the batch now", extra={"batch_id": batch_id})
        except MillraceError as error:
            logger.warning(
                "a batch was interrupted; it continues later",
                extra={"batch_id": batch_id, "cause": error.message},
            )
        except Exception:
            # The lease is left to lapse, which delays the next attempt.
            logger.exception("a batch has failed", extra={"batch_id": batch_id})
            self._runs.pop(batch_id, None)
            return
        self._runs.pop(batch_id, None)
        await self._release(batch_id)

    async def _forget_unborn(self, tenant: str, batch_id: str) -> None:
        now_ms = self._gateway.clock.now_ns() // _NS_PER_MS
        if now_ms - created_ms(batch_id) > _UNBORN_MS:
            await self._store.close(tenant, batch_id)

    @property
    def _lease_ms(self) -> int:
        return round(self._gateway.config.batch_lease_s * _MS_PER_S)

    async def _renew(self, link: RedisLink) -> None:
        for batch_id, running in list(self._runs.items()):
            key = redis_keys.batch_lease_key(batch_id)
            try:
                ours = await link.evaluate(_RENEW, [key], [self._holder, self._lease_ms])
            except RedisUnreachableError as error:
                # No other gateway can take the lease meanwhile.
                logger.debug("a lease was not renewed; retrying later", extra={"cause": str(error)})
                continue
            if not ours:
                logger.warning("a batch was lost", extra={"batch_id": batch_id})
                running.task.cancel()
                self._runs.pop(batch_id, None)

    async def _release(self, batch_id: str) -> None:
        link = self._gateway.redis
        assert link is not None
        try:
            await link.evaluate(RELEASE, [redis_keys.batch_lease_key(batch_id)], [self._holder])
        except RedisUnreachableError:
            return  # It lapses by itself.


def in_turn(waiting: Sequence[tuple[str, str]], running: Iterable[str]) -> list[tuple[str, str]]:
    """Order (tenant, batch id) pairs so that no tenant gets its second batch before the others have
    their first. ``running`` has the tenants of running batches.
    """
    places = Counter(running)
    ranked: list[tuple[int, str, str]] = []
    for tenant, batch_id in waiting:
        ranked.append((places[tenant], batch_id, tenant))
        places[tenant] += 1
    return [(tenant, batch_id) for _, batch_id, tenant in sorted(ranked)]

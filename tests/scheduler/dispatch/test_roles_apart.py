"""Separate prefill workers: long prompts are computed there, and streams decode elsewhere."""

from __future__ import annotations

import asyncio

from millrace.schemas.engines import WorkerRole
from tests.scheduler.lending import LONG, serving, tell_cached
from tests.scheduler.scripted_worker import ScriptedWorker
from tests.scheduler.world import World, job


async def _in_role(
    world: World, name: str, role: WorkerRole, pull_tokens_per_s: float = 400_000.0
) -> ScriptedWorker:
    worker = await serving(world, name)
    worker.role = role
    worker.prefill_tokens_per_s, worker.pull_tokens_per_s = 400.0, pull_tokens_per_s
    await worker.announce()
    return worker


async def _with_roles(
    world: World, pull_tokens_per_s: float = 400_000.0
) -> tuple[ScriptedWorker, ScriptedWorker]:
    """Add a prefill worker and a busy decode worker, which a long prompt would delay."""
    decoding = await _in_role(world, "d", WorkerRole.DECODE, pull_tokens_per_s)
    await world.client.jobs.publish(job("busy"))
    await world.until(lambda: "busy" in decoding.running)
    prefilling = await _in_role(world, "p", WorkerRole.PREFILL, pull_tokens_per_s)
    return prefilling, decoding


async def _ask_long(world: World, *names: str) -> None:
    for name in names:
        await world.client.jobs.publish(job(name, prompt_token_ids=LONG))


async def test_a_long_prompt_is_computed_apart_and_its_stream_goes_on_where_it_decodes(
    world: World,
) -> None:
    prefilling, decoding = await _with_roles(world)
    await _ask_long(world, "r1")
    await world.client.jobs.publish(job("short"))
    await world.until(lambda: "r1" in prefilling.running and "short" in decoding.running)
    await world.pass_s(1.0)
    assert "r1" in prefilling.running, "its prompt is not computed so far"
    await prefilling.tell_prefilled("r1")
    await world.until(lambda: "r1" in decoding.running)
    source = decoding.running["r1"].kv_source
    assert source is not None
    assert (source.worker_id, source.num_tokens) == (prefilling.worker_id, 400)
    assert not prefilling.running


SLOW_PULL = 4_000.0


async def test_what_there_is_of_a_prompt_is_pulled_while_the_rest_is_computed(
    world: World,
) -> None:
    prefilling, decoding = await _with_roles(world, SLOW_PULL)
    decoding.warms_when = asyncio.Event()
    await _ask_long(world, "r1")
    await world.until(lambda: "r1" in prefilling.running)
    await tell_cached(world, prefilling, LONG, num_blocks=4)
    await world.pass_s(0.2)
    assert not decoding.warmed, "that comes at once later"
    await tell_cached(world, prefilling, LONG, num_blocks=10, number=2)
    await world.until(lambda: bool(decoding.warmed))
    await tell_cached(world, prefilling, LONG, num_blocks=20, number=3)
    await world.pass_s(0.2)
    assert len(decoding.warmed) == 1, "it pulls what there was"
    decoding.warms_when.set()
    await world.pass_s(0.1)
    await tell_cached(world, prefilling, LONG, num_blocks=22, number=4)
    await world.until(lambda: len(decoding.warmed) == 2)
    assert [warm.kv_source.num_tokens for warm in decoding.warmed] == [160, 352]
    assert {(warm.job.request_id, warm.token_ids) for warm in decoding.warmed} == {("r1", ())}
    assert "r1" in prefilling.running, "its prompt is not computed so far"
    await prefilling.tell_prefilled("r1")
    await world.until(lambda: "r1" in decoding.running)
    assert len(decoding.warmed) == 2, "what is missing is little"


async def _with_prompt_under_way(world: World) -> tuple[ScriptedWorker, ScriptedWorker]:
    """Return a prefill and a decode worker; the latter has pulled 160 computed tokens of ``r1``."""
    prefilling, decoding = await _with_roles(world, SLOW_PULL)
    await _ask_long(world, "r1")
    await world.until(lambda: "r1" in prefilling.running)
    await tell_cached(world, prefilling, LONG, num_blocks=10)
    await world.until(lambda: bool(decoding.warmed))
    return prefilling, decoding


async def test_much_that_is_missing_of_a_prompt_is_pulled_before_its_stream_leaves(
    world: World,
) -> None:
    prefilling, decoding = await _with_prompt_under_way(world)
    await prefilling.tell_prefilled("r1")
    await world.until(lambda: "r1" in decoding.running)
    assert [warm.kv_source.num_tokens for warm in decoding.warmed] == [160, 399]


async def test_what_was_pulled_ahead_is_no_reason_to_wait_for_a_worker_that_is_gone(
    world: World,
) -> None:
    prefilling, decoding = await _with_prompt_under_way(world)
    await decoding.kill()
    other = await _in_role(world, "e", WorkerRole.DECODE, SLOW_PULL)
    await world.pass_s(5.0)
    await prefilling.tell_prefilled("r1")
    await world.until(lambda: "r1" in other.running)


async def test_a_stream_waits_at_its_prefill_worker_for_room_to_decode(world: World) -> None:
    prefilling, decoding = await _with_roles(world)
    decoding.rejection = "full"
    decoding.num_slots = 1
    await decoding.announce()
    await _ask_long(world, "r1", "r2")
    await world.until(lambda: len(prefilling.running) == 2)
    await prefilling.tell_prefilled("r1")
    await prefilling.tell_prefilled("r2")
    await world.pass_s(2.0)
    assert len(prefilling.running) == 2
    await prefilling.finish("r2")
    decoding.rejection, decoding.num_slots = "", 4
    await decoding.announce()
    await world.until(lambda: "r1" in decoding.running)


async def test_a_stream_stays_without_a_decode_worker_or_a_pull(world: World) -> None:
    prefilling, decoding = await _with_roles(world)
    await _ask_long(world, "r1")
    await world.until(lambda: "r1" in prefilling.running)
    prefilling.transfer = None
    await prefilling.announce()
    await prefilling.tell_prefilled("r1")
    await world.pass_s(1.0)
    assert "r1" in prefilling.running
    await decoding.kill()
    await world.pass_s(5.0)
    await _ask_long(world, "r2")
    await world.until(lambda: "r2" in prefilling.running)
    await prefilling.tell_prefilled("r2")
    await prefilling.tell_prefilled("nobody")
    await world.pass_s(1.0)
    assert {"r1", "r2"} <= set(prefilling.running)


async def test_a_stream_whose_prefilling_worker_dies_goes_on_where_it_can(world: World) -> None:
    prefilling, decoding = await _with_roles(world)
    await _ask_long(world, "r1")
    await world.until(lambda: "r1" in prefilling.running)
    await prefilling.kill()
    await world.until(lambda: "r1" in decoding.running)
    assert decoding.running["r1"].kv_source is None

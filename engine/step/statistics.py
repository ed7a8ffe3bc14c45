"""Statistics of an engine, collected from its parts."""

from __future__ import annotations

from collections.abc import Iterable

from millrace.engine.kv.objects.object_cache import ObjectFigures
from millrace.engine.kv.tiers import PeerFigures
from millrace.engine.scheduling.planner import Planner
from millrace.engine.step.adapter_pool import AdapterPool
from millrace.engine.step.executor import Executor
from millrace.engine.step.sequence import Sequence
from millrace.engine.types import EngineStats, RunnerFigures


def engine_stats(
    planner: Planner,
    executor: Executor,
    adapters: AdapterPool,
    live: Iterable[Sequence],
    peers: PeerFigures,
    objects: ObjectFigures,
    runner: RunnerFigures,
    *,
    num_steps: int,
    prefills: bool,
    max_tokens_per_request: int,
) -> EngineStats:
    """Collect the gauges and counters of an engine.

    Args:
        planner: Its planner, with the block tables.
        executor: Its executor.
        adapters: Its adapter pool.
        live: All unfinished sequences.
        peers: Figures of the exchange with other workers.
        objects: Figures of the exchange with an object store.
        runner: Counters of the runner's steps.
        num_steps: Steps so far.
        prefills: Whether the last step computed prompts.
        max_tokens_per_request: Longest prompt + completion.
    """
    tables, pool, speed = planner.tables, planner.tables.pool, executor.speed
    host = tables.host
    assert host is not None
    below = host.below.figures()
    num_prompt_tokens = _prompt_tokens(live) if planner.num_waiting or prefills else 0
    return EngineStats(
        max_num_sequences=planner.max_num_sequences,
        num_running=len(planner.running),
        num_waiting=planner.num_waiting,
        num_blocks=pool.num_blocks,
        num_free_blocks=pool.num_free_blocks,
        num_idle_blocks=pool.num_idle_blocks,
        num_steps=num_steps,
        prefill_tokens=executor.prefill_tokens,
        decode_tokens=executor.decode_tokens,
        proposed_tokens=executor.proposed_tokens,
        accepted_tokens=executor.accepted_tokens,
        num_preemptions=planner.num_preemptions,
        busy_s=executor.meter.busy_s,
        charged_s=executor.meter.charged_s,
        outstanding_tokens=planner.outstanding_tokens,
        outstanding_prompt_tokens=max(num_prompt_tokens - peers.num_coming_tokens, 0),
        outstanding_pull_tokens=peers.num_coming_tokens,
        prefill_tokens_per_s=speed.prefill_tokens_per_s,
        decode_step_ms=speed.decode_step_ms,
        max_tokens_per_request=max_tokens_per_request,
        prefix_query_tokens=tables.num_query_tokens,
        prefix_hit_tokens=tables.num_hit_tokens,
        host_hit_tokens=tables.tier_hits.num_host_tokens,
        disk_hit_tokens=tables.tier_hits.num_disk_tokens,
        object_hit_tokens=tables.tier_hits.num_object_tokens,
        peer_hit_tokens=tables.tier_hits.num_peer_tokens,
        num_evicted_blocks=tables.cached.num_evicted_blocks,
        num_host_blocks=host.num_slots,
        num_used_host_blocks=len(host),
        num_offloaded_blocks=host.num_stored_blocks,
        num_reloaded_blocks=host.num_loaded_blocks,
        num_disk_blocks=below.num_blocks,
        num_used_disk_blocks=below.num_used,
        num_written_blocks=below.num_written,
        num_read_blocks=below.num_read,
        num_unreadable_blocks=below.num_unreadable,
        num_object_written_blocks=objects.num_written_blocks,
        num_object_written_bytes=objects.num_written_bytes,
        num_object_read_blocks=objects.num_read_blocks,
        num_object_read_bytes=objects.num_read_bytes,
        num_absent_objects=objects.num_absent,
        num_object_failures=objects.num_failures,
        num_object_dropped_blocks=objects.num_dropped_blocks,
        is_object_store_left_alone=objects.is_left_alone,
        num_pulled_blocks=peers.num_pulled_blocks,
        num_pulled_bytes=peers.num_pulled_bytes,
        num_failed_pulls=peers.num_failed_pulls,
        num_served_blocks=peers.num_served_blocks,
        num_swaps=tables.cached.num_swaps,
        adapters=adapters.loaded(),
        max_adapters=adapters.num_slots,
        adapter_load_ms=adapters.load_s * 1e3,
        num_adapter_loads=adapters.num_loads,
        num_adapter_evictions=adapters.num_evictions,
        **runner._asdict(),
    )


def _prompt_tokens(live: Iterable[Sequence]) -> int:
    """Count the tokens to prefill. A sequence with one token left decodes."""
    behind = [len(one.token_ids) - one.num_computed_tokens for one in live]
    return sum([num_tokens for num_tokens in behind if num_tokens > 1])

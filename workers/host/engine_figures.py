"""What Prometheus sees of an engine: the figures that are one number of its stats each."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from millrace.engine.types import EngineStats


class Figure(NamedTuple):
    """A metric, and how to read it from an engine's stats."""

    name: str
    what: str
    read: Callable[[EngineStats], float]


def _used(stats: EngineStats) -> int:
    return stats.num_blocks - stats.num_free_blocks


GAUGES = (
    Figure(
        "millrace_num_requests_running",
        "Sequences in the engine's batch",
        lambda stats: stats.num_running,
    ),
    Figure(
        "millrace_max_num_requests_running",
        "Sequences that the engine's batch takes",
        lambda stats: stats.max_num_sequences,
    ),
    Figure(
        "millrace_kv_cache_usage_perc",
        "How much of the KV blocks is used, 1 being all",
        lambda stats: _used(stats) / stats.num_blocks if stats.num_blocks else 0.0,
    ),
    Figure(
        "millrace_kv_disk_blocks",
        "KV blocks that are on disk",
        lambda stats: stats.num_used_disk_blocks,
    ),
    Figure(
        "millrace_kv_object_store_left_alone",
        "1 while the object store for KV blocks is not asked because it failed, else 0",
        lambda stats: stats.is_object_store_left_alone,
    ),
    Figure(
        "millrace_kv_cache_blocks",
        "KV blocks that there are",
        lambda stats: stats.num_blocks,
    ),
    Figure(
        "millrace_kv_cache_used_blocks",
        "KV blocks that live requests hold",
        lambda stats: _used(stats),
    ),
    Figure(
        "millrace_kv_cache_idle_blocks",
        "Free KV blocks in which a prefix is cached",
        lambda stats: stats.num_idle_blocks,
    ),
    Figure(
        "millrace_kv_cache_host_blocks",
        "KV blocks that fit the host's memory",
        lambda stats: stats.num_host_blocks,
    ),
    Figure(
        "millrace_kv_cache_used_host_blocks",
        "KV blocks that are kept in the host's memory",
        lambda stats: stats.num_used_host_blocks,
    ),
    Figure(
        "millrace_adapters_loaded",
        "LoRA adapters that are in memory",
        lambda stats: len(stats.adapters),
    ),
    Figure(
        "millrace_max_adapters",
        "LoRA adapters that there is room for",
        lambda stats: stats.max_adapters,
    ),
    Figure(
        "millrace_outstanding_tokens",
        "Tokens that are still to be computed if nothing stops early",
        lambda stats: stats.outstanding_tokens,
    ),
)
COUNTERS = (
    Figure(
        "millrace_adapter_loads",
        "LoRA adapters that were loaded",
        lambda stats: stats.num_adapter_loads,
    ),
    Figure(
        "millrace_adapter_evictions",
        "LoRA adapters that made room for others",
        lambda stats: stats.num_adapter_evictions,
    ),
    Figure("millrace_engine_steps", "Steps of the engine", lambda stats: stats.num_steps),
    Figure(
        "millrace_engine_busy_seconds",
        "Time during which a step was under way",
        lambda stats: stats.busy_s,
    ),
    Figure(
        "millrace_engine_charged_seconds",
        "What of that time requests were charged for",
        lambda stats: stats.charged_s,
    ),
    Figure(
        "millrace_engine_prefill_tokens",
        "Tokens that were computed of prompts, and again after preemptions",
        lambda stats: stats.prefill_tokens,
    ),
    Figure(
        "millrace_engine_decode_tokens",
        "Tokens that were computed one after the other",
        lambda stats: stats.decode_tokens,
    ),
    Figure(
        "millrace_engine_proposed_tokens",
        "Tokens that were computed in case they should be the next",
        lambda stats: stats.proposed_tokens,
    ),
    Figure(
        "millrace_engine_accepted_tokens",
        "Tokens that were computed so and came",
        lambda stats: stats.accepted_tokens,
    ),
    Figure(
        "millrace_num_preemptions",
        "Times that a request was put back for want of KV blocks",
        lambda stats: stats.num_preemptions,
    ),
    Figure(
        "millrace_num_swaps",
        "Preemptions that kept what was computed in the host's memory",
        lambda stats: stats.num_swaps,
    ),
    Figure(
        "millrace_prefix_cache_queries",
        "Tokens that were looked for in the prefix cache",
        lambda stats: stats.prefix_query_tokens,
    ),
    Figure(
        "millrace_prefix_cache_hits",
        "Tokens that were found in the prefix cache",
        lambda stats: stats.prefix_hit_tokens,
    ),
    Figure(
        "millrace_kv_cache_evicted_blocks",
        "Cached KV blocks whose memory was needed",
        lambda stats: stats.num_evicted_blocks,
    ),
    Figure(
        "millrace_kv_disk_written_blocks",
        "KV blocks of idle conversations that were written to disk",
        lambda stats: stats.num_written_blocks,
    ),
    Figure(
        "millrace_kv_disk_read_blocks",
        "KV blocks that were read from disk",
        lambda stats: stats.num_read_blocks,
    ),
    Figure(
        "millrace_kv_disk_unreadable_blocks",
        "KV blocks on disk that were not what was written, and were computed",
        lambda stats: stats.num_unreadable_blocks,
    ),
    Figure(
        "millrace_kv_object_written_blocks",
        "KV blocks that were written to an object store",
        lambda stats: stats.num_object_written_blocks,
    ),
    Figure(
        "millrace_kv_object_written_bytes",
        "Bytes of KV blocks that were written to an object store",
        lambda stats: stats.num_object_written_bytes,
    ),
    Figure(
        "millrace_kv_object_read_blocks",
        "KV blocks that were read from an object store",
        lambda stats: stats.num_object_read_blocks,
    ),
    Figure(
        "millrace_kv_object_read_bytes",
        "Bytes of KV blocks that were read from an object store",
        lambda stats: stats.num_object_read_bytes,
    ),
    Figure(
        "millrace_kv_object_absent",
        "Objects that a prompt was looked for in, and that were not in the store",
        lambda stats: stats.num_absent_objects,
    ),
    Figure(
        "millrace_kv_object_failed",
        "Requests to an object store that failed, and objects that were not what was written",
        lambda stats: stats.num_object_failures,
    ),
    Figure(
        "millrace_kv_object_dropped_blocks",
        "KV blocks that were not written to an object store, as it failed or was too slow",
        lambda stats: stats.num_object_dropped_blocks,
    ),
    Figure(
        "millrace_kv_peer_pulled_blocks",
        "KV blocks that came from other workers' engines",
        lambda stats: stats.num_pulled_blocks,
    ),
    Figure(
        "millrace_kv_peer_pulled_bytes",
        "Bytes of KV blocks that came from other workers' engines",
        lambda stats: stats.num_pulled_bytes,
    ),
    Figure(
        "millrace_kv_peer_failed_pulls",
        "Times that KV blocks did not come from another worker's engine, and were computed",
        lambda stats: stats.num_failed_pulls,
    ),
    Figure(
        "millrace_kv_peer_served_blocks",
        "KV blocks that went to other workers' engines",
        lambda stats: stats.num_served_blocks,
    ),
    Figure(
        "millrace_kv_cache_offloaded_blocks",
        "KV blocks that were copied to the host's memory",
        lambda stats: stats.num_offloaded_blocks,
    ),
    Figure(
        "millrace_kv_cache_reloaded_blocks",
        "KV blocks that were copied back from the host's memory",
        lambda stats: stats.num_reloaded_blocks,
    ),
    Figure(
        "millrace_group_exchanges",
        "Times that rank 0 of a group met the other ranks in a step",
        lambda stats: stats.num_exchanges,
    ),
    Figure(
        "millrace_group_exchanged_bytes",
        "Bytes that rank 0 of a group exchanged with the other ranks in steps",
        lambda stats: stats.num_exchanged_bytes,
    ),
    Figure(
        "millrace_group_exchange_wait_seconds",
        "Time that rank 0 of a group waited for the other ranks in steps",
        lambda stats: stats.exchange_wait_s,
    ),
)

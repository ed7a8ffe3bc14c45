"""Prometheus metrics that are single numbers of an engine's stats."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from millrace.engine.types import EngineStats


def _used(stats: EngineStats) -> int:
    return stats.num_blocks - stats.num_free_blocks


GAUGES: Mapping[str, Callable[[EngineStats], float]] = {
    "millrace_num_requests_running": lambda stats: stats.num_running,
    "millrace_max_num_requests_running": lambda stats: stats.max_num_sequences,
    "millrace_kv_cache_usage_perc": lambda stats: (
        _used(stats) / stats.num_blocks if stats.num_blocks else 0.0
    ),
    "millrace_kv_disk_blocks": lambda stats: stats.num_used_disk_blocks,
    "millrace_kv_object_store_left_alone": lambda stats: stats.is_object_store_left_alone,
    "millrace_kv_cache_blocks": lambda stats: stats.num_blocks,
    "millrace_kv_cache_used_blocks": _used,
    "millrace_kv_cache_idle_blocks": lambda stats: stats.num_idle_blocks,
    "millrace_kv_cache_host_blocks": lambda stats: stats.num_host_blocks,
    "millrace_kv_cache_used_host_blocks": lambda stats: stats.num_used_host_blocks,
    "millrace_adapters_loaded": lambda stats: len(stats.adapters),
    "millrace_max_adapters": lambda stats: stats.max_adapters,
    "millrace_outstanding_tokens": lambda stats: stats.outstanding_tokens,
}
# Metrics of the fields that count from an engine's start.
COUNTERS = {
    "num_adapter_loads": "millrace_adapter_loads",
    "num_adapter_evictions": "millrace_adapter_evictions",
    "num_steps": "millrace_engine_steps",
    "busy_s": "millrace_engine_busy_seconds",
    "charged_s": "millrace_engine_charged_seconds",
    "prefill_tokens": "millrace_engine_prefill_tokens",
    "decode_tokens": "millrace_engine_decode_tokens",
    "proposed_tokens": "millrace_engine_proposed_tokens",
    "accepted_tokens": "millrace_engine_accepted_tokens",
    "num_preemptions": "millrace_num_preemptions",
    "num_swaps": "millrace_num_swaps",
    "prefix_query_tokens": "millrace_prefix_cache_queries",
    "prefix_hit_tokens": "millrace_prefix_cache_hits",
    "num_evicted_blocks": "millrace_kv_cache_evicted_blocks",
    "num_written_blocks": "millrace_kv_disk_written_blocks",
    "num_read_blocks": "millrace_kv_disk_read_blocks",
    "num_unreadable_blocks": "millrace_kv_disk_unreadable_blocks",
    "num_object_written_blocks": "millrace_kv_object_written_blocks",
    "num_object_written_bytes": "millrace_kv_object_written_bytes",
    "num_object_read_blocks": "millrace_kv_object_read_blocks",
    "num_object_read_bytes": "millrace_kv_object_read_bytes",
    "num_absent_objects": "millrace_kv_object_absent",
    "num_object_failures": "millrace_kv_object_failed",
    "num_object_dropped_blocks": "millrace_kv_object_dropped_blocks",
    "num_pulled_blocks": "millrace_kv_peer_pulled_blocks",
    "num_pulled_bytes": "millrace_kv_peer_pulled_bytes",
    "num_failed_pulls": "millrace_kv_peer_failed_pulls",
    "num_served_blocks": "millrace_kv_peer_served_blocks",
    "num_offloaded_blocks": "millrace_kv_cache_offloaded_blocks",
    "num_reloaded_blocks": "millrace_kv_cache_reloaded_blocks",
    "num_exchanges": "millrace_group_exchanges",
    "num_exchanged_bytes": "millrace_group_exchanged_bytes",
    "exchange_wait_s": "millrace_group_exchange_wait_seconds",
}
# Parts of ``prefix_hit_tokens`` that were not on the device, by their source.
TIERS = {
    "host_hit_tokens": "host",
    "disk_hit_tokens": "disk",
    "object_hit_tokens": "object",
    "peer_hit_tokens": "peer",
}
HELP = {
    "millrace_num_requests_running": "Sequences in the engine's batch",
    "millrace_max_num_requests_running": "Maximum number of sequences in the engine's batch",
    "millrace_kv_cache_usage_perc": "Share of the KV blocks in use (0 to 1)",
    "millrace_kv_disk_blocks": "KV blocks on disk",
    "millrace_kv_object_store_left_alone": (
        "1 while the object store for KV blocks is not used because it failed, else 0"
    ),
    "millrace_kv_cache_blocks": "KV blocks in total",
    "millrace_kv_cache_used_blocks": "KV blocks that live requests hold",
    "millrace_kv_cache_idle_blocks": "Free KV blocks in which a prefix is cached",
    "millrace_kv_cache_host_blocks": "KV blocks that fit in the host's memory",
    "millrace_kv_cache_used_host_blocks": "KV blocks in the host's memory",
    "millrace_adapters_loaded": "LoRA adapters in memory",
    "millrace_max_adapters": "Maximum number of LoRA adapters in memory",
    "millrace_outstanding_tokens": "Tokens still to be computed if no request stops early",
    "millrace_adapter_loads": "LoRA adapters that were loaded",
    "millrace_adapter_evictions": "LoRA adapters evicted to make room for others",
    "millrace_engine_steps": "Steps of the engine",
    "millrace_engine_busy_seconds": "Time during which a step was running",
    "millrace_engine_charged_seconds": "Part of the busy time that was charged to requests",
    "millrace_engine_prefill_tokens": (
        "Prompt tokens computed, including those computed again after preemptions"
    ),
    "millrace_engine_decode_tokens": "Tokens computed one after the other (decode)",
    "millrace_engine_proposed_tokens": "Tokens proposed by speculative decoding",
    "millrace_engine_accepted_tokens": "Proposed tokens that were accepted",
    "millrace_num_preemptions": "Preemptions of requests for lack of KV blocks",
    "millrace_num_swaps": "Preemptions that kept the computed blocks in the host's memory",
    "millrace_prefix_cache_queries": "Tokens looked up in the prefix cache",
    "millrace_prefix_cache_hits": "Tokens found in the prefix cache",
    "millrace_kv_cache_evicted_blocks": "Cached KV blocks evicted because their memory was needed",
    "millrace_kv_disk_written_blocks": "KV blocks of idle conversations written to disk",
    "millrace_kv_disk_read_blocks": "KV blocks read from disk",
    "millrace_kv_disk_unreadable_blocks": (
        "KV blocks on disk that were corrupt and had to be computed again"
    ),
    "millrace_kv_object_written_blocks": "KV blocks written to an object store",
    "millrace_kv_object_written_bytes": "Bytes of KV blocks written to an object store",
    "millrace_kv_object_read_blocks": "KV blocks read from an object store",
    "millrace_kv_object_read_bytes": "Bytes of KV blocks read from an object store",
    "millrace_kv_object_absent": "Objects looked up for a prompt that were not in the store",
    "millrace_kv_object_failed": (
        "Failed requests to an object store, and objects with corrupt content"
    ),
    "millrace_kv_object_dropped_blocks": (
        "KV blocks not written to an object store because it failed or was too slow"
    ),
    "millrace_kv_peer_pulled_blocks": "KV blocks pulled from other workers' engines",
    "millrace_kv_peer_pulled_bytes": "Bytes of KV blocks pulled from other workers' engines",
    "millrace_kv_peer_failed_pulls": (
        "Failed pulls of KV blocks from another worker's engine; the blocks were computed"
    ),
    "millrace_kv_peer_served_blocks": "KV blocks served to other workers' engines",
    "millrace_kv_cache_offloaded_blocks": "KV blocks copied to the host's memory",
    "millrace_kv_cache_reloaded_blocks": "KV blocks copied back from the host's memory",
    "millrace_group_exchanges": "Exchanges of rank 0 of a group with the other ranks in steps",
    "millrace_group_exchanged_bytes": (
        "Bytes that rank 0 of a group exchanged with the other ranks in steps"
    ),
    "millrace_group_exchange_wait_seconds": (
        "Time that rank 0 of a group waited for the other ranks in steps"
    ),
}

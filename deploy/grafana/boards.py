"""Contents of each board: saved queries over ClickHouse, and live values of Prometheus."""

from __future__ import annotations

from collections.abc import Sequence

from panels import Panel, live, row, series, stat, table


def latency() -> Sequence[Panel]:
    return (
        stat("Requests", "totals", "requests"),
        stat("TTFT, 95 %", "totals", "ttft_p95_ms", unit="ms"),
        stat("TPOT, 95 %", "totals", "tpot_p95_ms", unit="ms"),
        stat("E2E, 95 %", "totals", "e2e_p95_ms", unit="ms"),
        stat("Answered", "totals", "done / greatest(requests, 1)", unit="percentunit"),
        stat("Shed", "totals", "shed"),
        row("Latency for users"),
        series("Time to the first token", "latency", _percentiles("ttft"), unit="ms"),
        series("Time per output token", "latency", _percentiles("tpot"), unit="ms"),
        series("Time between tokens", "latency", _percentiles("itl"), unit="ms"),
        series("Whole requests", "latency", _percentiles("e2e"), unit="ms"),
        series("Time in the queue", "latency", _percentiles("queue"), unit="ms"),
        series(
            "Objectives met",
            "slo_attainment",
            ("attainment", "ttft_attainment", "tpot_attainment"),
            by=("model",),
            unit="percentunit",
            most=1,
            step="1m",
        ),
        table("By model", "latency_percentiles"),
        table("The slowest requests", "slowest_requests"),
        row("Just now, from the processes themselves"),
        live(
            "First tokens as gateways see them",
            _quantiles("millrace_time_to_first_token_seconds", "model"),
            description="From receipt to the first token sent.",
            unit="s",
        ),
        live(
            "Gaps between tokens: gateways and engines",
            {
                "gateway 99 %": _quantile(0.99, "millrace_inter_token_latency_seconds"),
                "engine 99 %": _quantile(0.99, "millrace_engine_inter_token_latency_seconds"),
                "engine 50 %": _quantile(0.5, "millrace_engine_inter_token_latency_seconds"),
            },
            description="The difference is added on the way from the engine to the client.",
            unit="s",
        ),
        live(
            "Late first tokens",
            {"{{model}}": "millrace:late_first_tokens:ratio_rate5m"},
            description="The share later than the objective of the alerts.",
            unit="percentunit",
            most=1,
        ),
        live(
            "Predicted TTFT of a new request",
            {"{{model}} {{tier}}": "max by (model, tier) (millrace_predicted_ttft_seconds)"},
            description="Prediction of the schedulers.",
            unit="s",
        ),
    )


def capacity() -> Sequence[Panel]:
    def by_model(title: str, column: str, unit: str = "short", most: float | None = None) -> Panel:
        return series(
            title, "capacity", (column,), by=("model",), unit=unit, most=most, step="1m", width=8
        )

    return (
        series("Requests", "traffic", _per_s("done", "cancelled", "shed", "failed"), unit="reqps"),
        series("Tokens", "tokens", _per_s("output", "prompt", "cached"), stack=True),
        row("Workers, by model"),
        by_model("Queue", "queued"),
        by_model("Running", "running"),
        by_model("Batch", "batch_size"),
        by_model("KV cache in use", "kv_use_percent", "percent", 100),
        by_model("Busy", "busy_percent", "percent", 100),
        by_model("Device utilisation (driver)", "device_percent", "percent", 100),
        by_model("Device memory", "device_memory_bytes", "bytes"),
        by_model("Step", "step_ms", "ms"),
        by_model("Found in the prefix cache", "prefix_hit_percent", "percent", 100),
        by_model("Decoded tokens per second", "decode_tokens_per_s"),
        by_model("Prefilled tokens per second", "prefill_tokens_per_s"),
        by_model("Preemptions", "preemptions"),
        series(
            "All workers: busy and idle money",
            "device_cost",
            ("busy_cost", "idle_cost"),
            by=("currency",),
            stack=True,
        ),
        series("All workers: sequences", "workers", ("running", "waiting", "queued")),
        table("Workers now", "workers_now", height=7),
        row("Just now, from the processes themselves"),
        live(
            "Oldest wait",
            {"{{model}} {{tier}}": "max by (model, tier) (millrace_scheduler_oldest_wait_seconds)"},
            description="The longest wait of a job that schedulers hold.",
            unit="s",
        ),
        live(
            "Workers: live, draining, wanted",
            {
                "{{model}}": "max by (model) (millrace_scheduler_workers)",
                "{{model}} draining": "max by (model) (millrace_scheduler_draining_workers)",
                "{{model}} wanted": "max by (model) (millrace_desired_workers)",
            },
            description="As the schedulers count them.",
        ),
        live(
            "KV cache by worker",
            {"{{worker}}": "millrace_kv_cache_usage_perc"},
            description="The share of the blocks in use by running requests.",
            unit="percentunit",
            most=1,
        ),
        live(
            "KV from peers",
            {
                "{{worker}}": "sum by (worker) (rate(millrace_kv_peer_pulled_bytes_total[5m]))",
            },
            description="KV blocks that each worker pulled from other workers.",
            unit="Bps",
        ),
        live(
            "KV from peers: failed pulls",
            {
                "{{worker}}": "sum by (worker) (increase(millrace_kv_peer_failed_pulls_total[5m]))",
            },
            description="Within 5 minutes; missing blocks were computed.",
        ),
        live(
            "Prefix cache hits by tier",
            {
                "{{source}}": "sum by (source) (rate(millrace_prefix_cache_tier_hits_total[5m]))",
                "computed": (
                    "sum(rate(millrace_prefix_cache_queries_total[5m])) "
                    "- sum(rate(millrace_prefix_cache_hits_total[5m]))"
                ),
            },
            description=(
                "Prompt tokens per second by the tier that had them: the device, host memory, "
                "disk, an object store or a peer; or computed."
            ),
            stack=True,
        ),
        live(
            "Moved streams",
            {
                "{{model}} {{source}}": (
                    "sum by (model, source) (rate(millrace_scheduler_moves_total[5m]))"
                ),
            },
            description="By source of their context: pulled from the former worker, or computed.",
            unit="ops",
        ),
        live(
            "Steps",
            {
                "{{model}} 50 %": _quantile(0.5, "millrace_engine_step_duration_seconds", "model"),
                "{{model}} 99 %": _quantile(0.99, "millrace_engine_step_duration_seconds", "model"),
            },
            description="Duration of the engines' steps.",
            unit="s",
        ),
        live(
            "Fairness gap",
            {"{{model}} {{tier}}": "max by (model, tier) (millrace_scheduler_fairness_gap_tokens)"},
            description=(
                "Difference between the most and the least virtual tokens served, among tenants "
                "with waiting jobs."
            ),
        ),
        live(
            "Memory of the processes",
            {"{{part}} {{instance}}": 'process_resident_memory_bytes{job="millrace"}'},
            description="Resident.",
            unit="bytes",
        ),
    )


def cost() -> Sequence[Panel]:
    return (
        stat("Tenants pay", "totals", _money("costs"), width=6, text=True),
        stat("Devices cost", "totals", _money("device_costs"), width=6, text=True),
        stat("Device time", "totals", "device_us / 1e6", unit="s", width=6),
        stat("Energy", "totals", "energy_j", unit="joule", width=6),
        stat("Output tokens", "totals", "completion_tokens", width=6),
        row("Over time"),
        series(
            "Revenue from tenants",
            "cost_by_model",
            {"cost": "toFloat64(cost)"},
            by=("model", "currency"),
            stack=True,
            bars=True,
            step="1m",
        ),
        series(
            "Device cost",
            "cost_by_model",
            {"device_cost": "toFloat64(device_cost)"},
            by=("model", "currency"),
            stack=True,
            bars=True,
            step="1m",
        ),
        row("Cost of a million tokens, and idle devices"),
        table("Unit cost, four ways", "unit_cost"),
        table("Busy, idle and uncharged device time", "idle_cost"),
        table("Saved by the prefix cache", "cache_savings", height=7),
        row("Usage"),
        table("By tenant", "usage_by_tenant", width=12),
        table("By user", "usage_by_user", width=12),
        table("By model", "usage_by_model", width=12),
        table("By adapter", "usage_by_adapter", width=12),
        table("By day", "usage_by_day"),
        table("Invoice lines", "invoice"),
    )


def reliability() -> Sequence[Panel]:
    def by_model(title: str, columns: Sequence[str]) -> Panel:
        return series(title, "reliability", columns, by=("model",), step="1m", bars=True)

    return (
        stat("Failed", "totals", "failed", width=6),
        stat("Expired", "totals", "expired", width=6),
        stat("Shed", "totals", "shed", width=6),
        stat("Moved", "totals", "moved", width=6),
        row("Failures and recoveries"),
        by_model("Unsuccessful requests", ("shed", "failed", "expired")),
        by_model("Moved and preempted requests", ("moves", "preemptions")),
        by_model("Effects on clients", ("resumes", "replays", "stalls")),
        series(
            "Interruptions, all together", "interruptions", _INTERRUPTIONS, bars=True, step="1m"
        ),
        table("Error codes", "error_codes"),
        table("Deliveries", "deliveries_health"),
        row("Just now, from the processes themselves"),
        live(
            "Healthy parts",
            {"{{part}} {{instance}}": "millrace_healthy"},
            description="1: /healthz says ok.",
            most=1,
        ),
        live(
            "Reasons for moved attempts",
            {"{{why}}": "sum by (why) (rate(millrace_scheduler_reruns_total[5m]))"},
            description="Moved from a draining worker, lost with a worker, or released.",
            unit="ops",
        ),
        live(
            "Dispatches by result",
            {"{{result}}": "sum by (result) (rate(millrace_scheduler_dispatches_total[5m]))"},
            description="Answers of workers to schedulers.",
            unit="ops",
        ),
        live(
            "Ended without a worker",
            {
                "{{status}} {{code}}": (
                    "sum by (status, code) (rate(millrace_scheduler_ended_jobs_total[5m]))"
                )
            },
            description="Shed, expired, cancelled or refused by schedulers.",
            unit="ops",
        ),
        live(
            "HTTP answers",
            {"{{status}}": "sum by (status) (rate(millrace_http_requests_total[5m]))"},
            description="By status, of all gateways.",
            unit="reqps",
            stack=True,
        ),
        live(
            "Refused by a limit",
            {"{{limit}}": "sum by (limit) (rate(millrace_limit_refusals_total[5m]))"},
            description="Requests of tenants over a limit.",
            unit="reqps",
        ),
        live(
            "Telemetry: records not stored yet",
            {
                "Kafka {{topic}}": "max by (topic) (millrace_telemetry_lag_messages)",
                "outbox": "max(millrace_telemetry_outbox_waiting_records)",
            },
            description="Records on their way to ClickHouse.",
        ),
        live(
            "Telemetry: stored, dead, lost",
            {
                "stored": "sum(rate(millrace_telemetry_stored_records_total[5m]))",
                "dead letters": "sum(rate(millrace_telemetry_dead_letters_total[5m]))",
                "lost": "sum(rate(millrace_lost_delivery_records_total[5m]))",
            },
            description="Records per second.",
            unit="ops",
        ),
    )


def _money(column: str) -> str:
    """Format each amount with its currency, rounded; the tables have the exact amounts."""
    amount = "concat(toString(round(toFloat64OrZero(amount), 4)), ' ', currency)"
    amounts = f"arrayMap((currency, amount) -> {amount}, currencies, {column})"
    return f"arrayStringConcat({amounts}, ', ')"


_INTERRUPTIONS = ("moves", "preemptions", "shed", "expired", "failed", "resumes", "stalls")


def _percentiles(what: str) -> list[str]:
    return [f"{what}_p{level}_ms" for level in (50, 95, 99)]


def _per_s(*names: str) -> list[str]:
    return [f"{name}_per_s" for name in names]


def _quantile(level: float, histogram: str, label: str = "") -> str:
    by = f"{label}, le" if label else "le"
    return f"histogram_quantile({level}, sum by ({by}) (rate({histogram}_bucket[5m])))"


def _quantiles(histogram: str, label: str) -> dict[str, str]:
    return {
        f"{{{{{label}}}}} {round(level * 100)} %": _quantile(level, histogram, label)
        for level in (0.5, 0.95, 0.99)
    }

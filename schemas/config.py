"""The one typed configuration tree. ``runtime.settings`` reads it, from a file and variables."""

from __future__ import annotations

from typing import Literal

import msgspec

from schemas.redaction import Secret, shown
from schemas.tenants import TierLimits


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    def __repr__(self) -> str:
        return shown(self)


class _TlsFiles(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """PEM files of a connection: the authorities that may have signed the server's certificate
    (none: those of this machine), and our own certificate with its key, for servers that demand
    one. Any of them demands TLS."""

    ca_file: str = ""
    certificate_file: str = ""
    key_file: str = ""


class NatsConfig(_TlsFiles, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``url`` may list several servers, comma separated; ``tls://`` demands TLS, as the PEM files
    do. One of ``user`` with ``password``, ``token``, ``nkey_seed`` and ``creds_file`` (a user's JWT
    and seed, read again at each connect) says who we are.

    ``ack_wait_s`` is the lease: how long a dead holder's job waits before it is delivered again.
    ``files_ttl_s`` is how long uploaded files, batches and their answers are kept. Answers to us
    come to subjects below ``inbox_prefix``, which the server may let only one user read (empty:
    that of the part; see ``bus.nats.permissions``)."""

    url: str = "nats://127.0.0.1:4222"
    user: str = ""
    password: Secret = ""
    token: Secret = ""
    nkey_seed: Secret = ""
    creds_file: str = ""
    replicas: int = 1
    ack_wait_s: float = 6.0
    max_deliver: int = 8
    max_stored_jobs: int = 200_000
    results_ttl_s: float = 86_400.0
    files_ttl_s: float = 30 * 86_400.0
    outbox_max_age_s: float = 7 * 86_400.0
    connect_timeout_s: float = 5.0
    inbox_prefix: str = ""


class RedisConfig(_TlsFiles, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``rediss://`` demands TLS, as the PEM files do. ``user`` is one of Redis's access control
    list; without it a ``password`` is that of the default user.

    With ``sentinels`` (``host:port``, several), these say which server is the master of the name
    ``sentinel_master`` now, and ``url`` is used for its database and TLS only."""

    url: str = "redis://127.0.0.1:6379/0"
    user: str = ""
    password: Secret = ""
    sentinels: tuple[str, ...] = ()
    sentinel_master: str = ""
    sentinel_user: str = ""
    sentinel_password: Secret = ""


class KafkaConfig(_TlsFiles, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``tls`` demands TLS, as the PEM files do. With a ``sasl_mechanism``, ``user`` and
    ``password`` say who we are; PLAIN shows the password to whoever reads along, so it wants TLS.
    ``partitions`` and ``replication_factor`` are used when the topics are created."""

    bootstrap_servers: str = "127.0.0.1:9092"
    tls: bool = False
    sasl_mechanism: Literal["", "PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] = ""
    user: str = ""
    password: Secret = ""
    partitions: int = 3
    replication_factor: int = 1
    group: str = "millrace-sink"


class ClickHouseConfig(_TlsFiles, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where rows go: ``url`` of a server (``https://`` for TLS, by the PEM files), or ``path`` of
    an embedded store that the telemetry process owns and serves to others on
    ``serve_host:serve_port``."""

    url: str = ""
    path: str = ""
    database: str = "millrace"
    username: str = "default"
    password: Secret = ""
    serve_host: str = "127.0.0.1"
    serve_port: int = 8123


class SessionContexts(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What becomes of the oldest turns of a session, by the caller's tier, when they do not fit the
    context window any more: "window" leaves them out, "summary" has the model summarise them."""

    free: Literal["window", "summary"] = "window"
    pro: Literal["window", "summary"] = "summary"
    enterprise: Literal["window", "summary"] = "summary"
    batch: Literal["window", "summary"] = "window"


class GatewayConfig(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``gateway_id`` empty: one is drawn at start. ``auth`` "auto" demands API keys unless ``host``
    is loopback, "required" always does, "none" never does; ``tiers`` are the limits of tenants of
    each tier (see ``schemas.tenants``). With ``certificate_file`` and
    ``key_file`` (PEM) it speaks TLS, and reads them again when they change. ``trusted_proxies``
    are the addresses or networks whose ``X-Forwarded-For`` and ``-Proto`` are believed; where only
    callers of this machine need no key, a request that was forwarded needs one. Sizes bound
    what one client may send or make us hold. A body must be whole after ``body_timeout_s``, and as
    much later as what has come of it takes at ``body_bytes_per_s``.
    ``max_file_bytes`` is for an uploaded file, ``max_stored_file_bytes`` for all of a tenant's,
    which are ``max_stored_files`` at most.

    A tenant has at most ``max_open_batches`` batches that are not finished. A gateway works on
    ``max_batches_at_once`` of all, on ``batch_lines_at_once`` requests of each. One that dies is
    noticed after ``batch_lease_s``, a new batch within ``batch_scan_s``.

    A session is kept for ``session_ttl_s`` after its last request and holds at most
    ``session_max_bytes`` and ``session_max_messages``. Its prompt leaves a completion of no stated
    length ``session_reserve_tokens`` where it can. When its messages pass ``session_summary_share``
    of the context window, the oldest may become a summary of ``session_summary_tokens`` at most,
    where ``session_context`` says so.

    ``tools`` is a file of HTTP tools that the gateway runs itself (none if empty), at most
    ``max_tool_runs`` at a time. They may lead to the hosts of ``tool_allowed_hosts`` only, where
    ``*.name`` stands for all hosts below a name; empty: to any.

    An answer with server tools takes at most ``max_tool_rounds`` turns of the model. One whose
    WebSocket was lost goes on for ``resume_grace_s`` for a client that comes back; one with an
    Idempotency-Key is made to its end, and kept for ``idempotency_ttl_s``. Pages of
    ``allowed_origins`` (``https://app.example``; ``*``: any) may use the gateway from a browser,
    beside its own. ``max_sockets_per_address`` 0 is no limit.

    Answers of the Responses API are kept for ``response_ttl_s``, with the conversation before them
    if that has at most ``response_max_bytes``.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    certificate_file: str = ""
    key_file: str = ""
    trusted_proxies: tuple[str, ...] = ()
    gateway_id: str = ""
    auth: Literal["auto", "required", "none"] = "auto"
    tiers: TierLimits = TierLimits()
    max_body_bytes: int = 4 * 1024 * 1024
    body_timeout_s: float = 30.0
    body_bytes_per_s: int = 32 * 1024
    max_ws_message_bytes: int = 1024 * 1024
    max_generations_per_socket: int = 64
    max_sockets_per_address: int = 4_096
    max_tool_rounds: int = 8
    allowed_origins: tuple[str, ...] = ()
    resume_grace_s: float = 20.0
    idempotency_ttl_s: float = 86_400.0
    client_buffer_bytes: int = 256 * 1024
    client_stall_timeout_s: float = 30.0
    request_timeout_s: float = 600.0
    replay_probe_s: float = 2.0
    drain_timeout_s: float = 8.0
    telemetry_timeout_s: float = 5.0
    response_ttl_s: float = 86_400.0
    response_max_bytes: int = 8 * 1024 * 1024
    max_file_bytes: int = 100 * 1024 * 1024
    max_stored_file_bytes: int = 10 * 1024 * 1024 * 1024
    max_stored_files: int = 10_000
    max_open_batches: int = 100
    max_batches_at_once: int = 8
    batch_lines_at_once: int = 128
    batch_lease_s: float = 10.0
    batch_scan_s: float = 1.0
    session_ttl_s: float = 3_600.0
    session_max_bytes: int = 4 * 1024 * 1024
    session_max_messages: int = 2_000
    session_reserve_tokens: int = 1_024
    session_context: SessionContexts = SessionContexts()
    session_summary_share: float = 0.6
    session_summary_tokens: int = 256
    tools: str = ""
    tool_allowed_hosts: tuple[str, ...] = ()
    max_tool_runs: int = 32


class TierPolicy(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a scheduler treats a tier. Backlogged tiers share the workers by ``weight``. A job whose
    first token is predicted later than ``ttft_bound_ms`` (0: no bound) goes to a smaller model if
    ``degrade`` and its caller left the choice (``model: auto``), else it is refused if ``shed``,
    else it waits."""

    weight: float
    ttft_bound_ms: float = 0.0
    degrade: bool = False
    shed: bool = False


class TierPolicies(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One for each tier. Batch work has no weight: it gets what the others leave."""

    enterprise: TierPolicy = TierPolicy(weight=8.0, ttft_bound_ms=5_000.0)
    pro: TierPolicy = TierPolicy(weight=4.0, ttft_bound_ms=10_000.0, degrade=True)
    free: TierPolicy = TierPolicy(weight=1.0, ttft_bound_ms=60_000.0, degrade=True, shed=True)
    batch: TierPolicy = TierPolicy(weight=1.0)


class AutoscaleConfig(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many workers a model should have: enough that jobs are predicted to wait no longer than
    ``target_wait_s`` and the KV cache is no fuller than ``target_kv_share``, between
    ``min_workers`` (0: a model that nobody asks for has none) and ``max_workers`` (0: no
    autoscaling). ``cold_start_s`` is what a worker takes to be there. More are wanted as soon as
    the need is seen; fewer when it was not seen for ``scale_down_after_s``,
    none when nothing came for ``idle_s``."""

    min_workers: int = 1
    max_workers: int = 0
    target_wait_s: float = 2.0
    target_kv_share: float = 0.85
    cold_start_s: float = 10.0
    scale_down_after_s: float = 60.0
    idle_s: float = 300.0


class SchedulerConfig(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``max_queued_jobs`` is the bound per model over which the newest jobs are shed, those of the
    tenants with the longest queues first.

    While there is no room, a scheduler holds the first ``window_jobs_per_tenant`` jobs of each
    tenant and ``window_jobs`` of each tier; the others stay in the queue. ``order`` is what comes
    first among the jobs of one tenant: the earliest ``deadline`` (then arrival), or the
    ``shortest`` predicted completion, with ``ageing_s`` of waiting as good as half the length.
    ``placement``: "affine" weighs a worker's cached prefixes against its load, "least_loaded"
    looks at load alone. Output tokens are charged ``output_weight`` times as much as input."""

    scheduler_id: str = ""
    models: tuple[str, ...] = ()
    max_queued_jobs: int = 2_000
    heartbeat_timeout_s: float = 2.0
    lease_extend_s: float = 2.0
    dispatch_timeout_s: float = 1.0
    resume_timeout_s: float = 0.5
    max_attempts: int = 16
    cancel_memory_s: float = 600.0
    status_interval_s: float = 0.25
    window_jobs: int = 512
    window_jobs_per_tenant: int = 8
    order: Literal["deadline", "shortest"] = "deadline"
    ageing_s: float = 10.0
    placement: Literal["affine", "least_loaded"] = "affine"
    max_prefix_keys: int = 1_000_000
    output_weight: float = 2.0
    tiers: TierPolicies = TierPolicies()
    autoscale: AutoscaleConfig = AutoscaleConfig()


class SimulationConfig(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An engine that computes nothing and takes the time that a real one would: prompts at
    ``prefill_tokens_per_s``, and ``step_ms + step_ms_per_sequence * batch + step_ms_per_kv_token *
    KV tokens`` for a step that decodes; ``start_s`` until it is there. Its tokens follow from the
    seed and their index, whoever makes them."""

    prefill_tokens_per_s: float = 20_000.0
    step_ms: float = 8.0
    step_ms_per_sequence: float = 0.05
    step_ms_per_kv_token: float = 0.000_02
    start_s: float = 0.0


class EngineConfig(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The engine's bounds. ``kind`` "simulated" computes nothing: see ``SimulationConfig``.

    ``max_batch_tokens`` is the longest step. 0 of it, of ``max_num_sequences`` and of
    ``kv_cache_bytes`` leaves the choice to the device: 384 tokens, 64 sequences and 1 GiB on a CPU,
    4,096 tokens, 256 sequences and what is left of ``gpu_memory_fraction`` on a GPU. ``num_blocks``
    0 sizes the pool from ``kv_cache_bytes``.
    ``num_threads`` 0 chooses by the machine and what else runs on it. ``kernels``: "auto" computes
    with "triton" on CUDA, with "native" (compiled ones) on a CPU where they can be had, else with
    "torch" alone; "reference" is plain torch in place of the Triton kernels.
    ``load_format`` "dummy" makes random weights for a config.json. ``gpu_memory_fraction`` of a
    GPU's memory are for weights, work space and KV cache, whose keys and values are kept as
    ``kv_cache_dtype`` ("auto": like the weights; "fp8": e4m3 with a scale for each head of each
    token). ``cuda_graphs`` replays recorded steps, ``overlap`` launches a step before the one
    before it is read, ``deterministic`` has tokens not depend on the batch, at a price in speed.
    ``prefix_cache`` lets prompts begin with what earlier ones left in the KV cache.
    ``host_cache_bytes`` of memory beside it take the blocks of preempted requests and those that
    nobody used for ``idle_offload_s``, until they are wanted again (0: none do). A waiting request
    gains a level of priority every ``ageing_s`` (0: never). ``itl_bound_ms`` bounds the chunks of
    prompts so that a step is predicted to take no longer while others decode (0: no bound).
    """

    kind: Literal["real", "simulated"] = "real"
    simulation: SimulationConfig = SimulationConfig()
    max_num_sequences: int = 0
    max_batch_tokens: int = 0
    block_size_tokens: int = 16
    num_blocks: int = 0
    kv_cache_bytes: int = 0
    dtype: str = "auto"
    device: str = "auto"
    kernels: str = "auto"
    num_threads: int = 0
    prefix_cache: bool = True
    host_cache_bytes: int = 1 << 30
    idle_offload_s: float = 30.0
    ageing_s: float = 10.0
    itl_bound_ms: float = 0.0
    load_format: str = "auto"
    gpu_memory_fraction: float = 0.9
    kv_cache_dtype: str = "auto"
    cuda_graphs: bool = True
    overlap: bool = True
    deterministic: bool = False


class WorkerConfig(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``name`` is this worker's alone, and stays over restarts where something gives it one; empty:
    one is drawn at start. ``max_num_waiting`` is how many jobs beyond the running ones a worker
    takes, so that a free slot never waits for the bus. ``prefix_scope`` "tenant" keeps what is
    cached of one tenant's prompts from speeding up another's, who could learn from that what they
    begin with; "shared" lets all tenants use it. Callers without a key are one tenant.
    ``prefix_report_s`` is how often the schedulers are told what is cached (0: never), all of
    it every ``prefix_whole_s``, at most ``max_reported_prefixes`` blocks."""

    name: str = ""
    model: str = "demo"
    flush_interval_ms: float = 15.0
    heartbeat_s: float = 0.5
    lease_extend_s: float = 2.0
    max_num_waiting: int = 8
    replay_memory_s: float = 120.0
    sample_interval_s: float = 1.0
    drain_timeout_s: float = 8.0
    prefix_scope: Literal["tenant", "shared"] = "tenant"
    prefix_report_s: float = 0.1
    prefix_whole_s: float = 10.0
    max_reported_prefixes: int = 16_384
    engine: EngineConfig = EngineConfig()


class TelemetryConfig(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A batch of rows is stored when it has ``batch_rows``, or ``batch_interval_s`` after the first
    of them. Usage by the minute follows within ``rollup_interval_s``."""

    batch_rows: int = 5_000
    batch_interval_s: float = 0.5
    rollup_interval_s: float = 2.0


class StorageConfig(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Room on the disks of the stores. ``nats_dir``, ``redis_dir``, ``kafka_dir`` and
    ``clickhouse_dir`` are the folders of those whose disk this process can see (``millrace up``
    knows them). While the disk of NATS has less than ``min_free_bytes`` free, gateways accept
    nothing new; what is left is for what was accepted. With less than half of it the queue itself
    refuses jobs, whoever publishes them. Everything is looked at every ``check_interval_s``."""

    nats_dir: str = ""
    redis_dir: str = ""
    kafka_dir: str = ""
    clickhouse_dir: str = ""
    min_free_bytes: int = 128 * 1024 * 1024
    check_interval_s: float = 1.0


class MetricsConfig(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a process shows ``/metrics`` to Prometheus, and ``/healthz`` (``port`` 0: nowhere). A
    gateway shows them on its own port, too, which several gateways may share.

    Whoever asks for ``/metrics`` has to send ``token`` (``Authorization: Bearer …``), if there is
    one. On an address that other machines can reach there has to be one, unless ``public`` says
    that whoever reaches it may read it. ``/healthz`` is open to all."""

    host: str = "127.0.0.1"
    port: int = 0
    token: Secret = ""
    public: bool = False


class TracingConfig(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where distributed traces go: ``endpoint`` is the base URL of an OpenTelemetry collector that
    takes OTLP over HTTP (``http://127.0.0.1:4318``); empty: there are none. ``sample_ratio`` of the
    traces that begin here are recorded; one that a caller began is recorded if the caller does."""

    endpoint: str = ""
    sample_ratio: float = 1.0


class Config(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that a Millrace process can be told. ``catalogue`` is a models.yaml; empty means
    the built-in catalogue with the demo model."""

    catalogue: str = ""
    log_level: str = "info"
    nats: NatsConfig = NatsConfig()
    redis: RedisConfig = RedisConfig()
    kafka: KafkaConfig = KafkaConfig()
    clickhouse: ClickHouseConfig = ClickHouseConfig()
    gateway: GatewayConfig = GatewayConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    worker: WorkerConfig = WorkerConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    storage: StorageConfig = StorageConfig()
    metrics: MetricsConfig = MetricsConfig()
    tracing: TracingConfig = TracingConfig()

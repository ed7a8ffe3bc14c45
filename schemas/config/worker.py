"""Settings of the worker and its engine."""

from __future__ import annotations

from typing import Literal

from millrace.schemas.config.section import Section
from millrace.schemas.engines import EngineKind, WorkerRole
from millrace.schemas.redaction import Secret

TransferTransport = Literal["plain", "auto", "nixl"]


class SimulationConfig(Section, frozen=True, kw_only=True):
    """Timing of the simulated engine, which computes nothing and takes as long as a real engine
    would. Its tokens depend on the seed and their index alone. A decode step takes ``step_ms +
    step_ms_per_sequence * sequences + step_ms_per_kv_token * KV tokens``.
    ``worker.engine.tensor_parallel`` divides these times and the prompts' times, and adds
    ``collective_ms + collective_ms_per_token * tokens + collective_ms_per_sequence * sequences`` to
    each step."""

    prefill_tokens_per_s: float = 20_000.0
    """Prompt tokens computed a second."""

    step_ms: float = 8.0
    """Fixed time of a step."""

    step_ms_per_sequence: float = 0.05
    """Time that each sequence adds to a step."""

    step_ms_per_kv_token: float = 0.000_02
    """Time that each token in the KV cache adds to a step."""

    collective_ms: float = 0.0
    """What the ranks of a group take in each step to exchange anything at all."""

    collective_ms_per_token: float = 0.0
    """Time that each token of a prompt or an answer adds to that."""

    collective_ms_per_sequence: float = 0.0
    """Time that each sequence that decodes adds to that: its logits."""

    start_s: float = 0.0
    """How long the engine takes to start."""


class EngineConfig(Section, frozen=True, kw_only=True):
    """Limits of the engine. 0 lets the device choose: 384 tokens, 64 sequences and 1 GiB of KV
    cache on a CPU; 4,096 tokens, 256 sequences and the rest of ``gpu_memory_fraction`` on a GPU."""

    kind: EngineKind = EngineKind.REAL
    """``real`` is Millrace's own engine, ``simulated`` computes nothing (see
    ``worker.engine.simulation``); the other kinds drive a server of another engine, see
    docs/engines.md."""

    simulation: SimulationConfig = SimulationConfig()
    """Times of the simulated engine."""

    url: str = ""
    """Address of a running server of another engine; empty: the worker starts one."""

    command: str = ""
    """Program that starts such a server; empty: the usual one, from ``.engines`` (``make engines``)
    or the ``PATH``. For a custom engine, its class as ``module:Class`` or ``file.py:Class``."""

    arguments: tuple[str, ...] = ()
    """Further command-line arguments of the server, such as ``--tensor-parallel-size 4``."""

    api_key: Secret = ""
    """Bearer token of the server at ``url``."""

    served_name: str = ""
    """Name of the model at the server ``url``; empty: the first model that the server lists."""

    start_timeout_s: float = 600.0
    """Seconds until such a server, or a rank, must answer after its start."""

    max_num_sequences: int = 0
    """Sequences that decode at a time; 0: chosen by the device."""

    max_batch_tokens: int = 0
    """Most tokens of a step; 0: chosen by the device."""

    block_size_tokens: int = 16
    """Tokens of a block of the KV cache."""

    num_blocks: int = 0
    """Blocks of the KV cache; 0: as many as fit in ``kv_cache_bytes``."""

    kv_cache_bytes: int = 0
    """Size of the KV cache in bytes; 0: chosen by the device."""

    dtype: str = "auto"
    """Type of the weights in memory (``float32``, ``bfloat16``, ``float16``); ``auto``: chosen by
    the checkpoint and the device."""

    quantization: str | None = None
    """Quantization of wide weights at load: ``int8``, ``fp8`` (activations are rounded to the same
    type) or ``int4`` (activations stay wide); none: as the checkpoint is. For Millrace's own
    engine. If none, the model's ``quantization`` in the catalogue applies."""

    kv_cache_dtype: str = "auto"
    """Type of cached keys and values. ``auto``: the type of the weights. ``fp8`` (e4m3, on a GPU)
    and ``int8`` (on a CPU) have 8 bits, with scales for each head of each token."""

    device: str = "auto"
    """``cpu``, ``cuda`` or ``cuda:N``; ``auto``: a GPU if there is one."""

    gpu_memory_fraction: float = 0.9
    """Share of a GPU's memory, above 0 to 1, for weights, work space and KV cache."""

    kernels: str = "auto"
    """``triton`` (CUDA), ``native`` (compiled, CPU, including all matrix products), ``torch``, or
    ``reference`` (plain torch in place of the Triton kernels); ``auto``: the fastest kernels of the
    device."""

    num_threads: int = 0
    """CPU threads of each rank; 0: chosen by the machine and its other load."""

    tensor_parallel: int = 1
    """Ranks that compute each layer together. Each rank has its own process and device, its slices
    of the weights and its heads of the KV cache; see docs/parallelism.md. Servers of other engines
    are started with this number, and device time is that of as many devices."""

    pipeline_parallel: int = 1
    """Stages of a pipeline. Each stage computes some of the layers while the next stage computes
    another batch, and has ``tensor_parallel`` ranks. With GPUs, all stages run on one host."""

    remote_stages: int = 0
    """Number of stages, counted from the last one, that run on other hosts. Each is started there
    by ``millrace stages``; see docs/parallelism.md."""

    stages_address: str = "127.0.0.1:7500"
    """``host:port`` at which the hosts of remote stages join. An address beyond this machine needs
    ``stages_token``. Keep it to a private network of the cluster: the connection is not encrypted.
    """

    stages_token: Secret = ""
    """Shared secret of the worker and the stages that join it: the same long random text on both
    sides. It is never sent."""

    expert_parallel: bool = False
    """Give each rank some of a mixture's experts whole, rather than a slice of all experts."""

    collectives: str = "auto"
    """Transport of collectives between ranks: ``shared_memory`` (a CPU, one machine) or ``gloo``;
    ``auto``: shared memory if the compiled kernels are available. Ranks on GPUs exchange numbers by
    NCCL and use this transport to receive the plan of each step."""

    rank_timeout_s: float = 60.0
    """Seconds that a rank waits for the others in the middle of a step. After that all ranks end
    and restart, and requests continue."""

    cuda_graphs: bool = True
    """Replay recorded steps (CUDA graphs) on a GPU."""

    overlap: bool = True
    """Launch a step before the results of the previous step are read."""

    speculation: str | bool | None = None
    """Speculative decoding: several tokens are proposed and checked per step, with unchanged
    results. ``ngram`` proposes the continuation of earlier equal text, the grammar's forced tokens,
    and the request's prediction. ``draft=PATH`` also proposes tokens of the checkpoint at the path;
    ``eagle3=PATH`` those of the EAGLE-3 head at the path. ``off`` (or false) proposes nothing.
    None: the model's ``speculation`` in the catalogue. Without that: ``ngram``, and the checkpoint
    in the model's folder ``draft`` if it has one, on devices where rows are batch-invariant, as
    with the compiled kernels in bfloat16 on a CPU; else ``off``. On a GPU the default is ``off``.
    See docs/speculation.md."""

    max_adapters: int | None = None
    """LoRA adapters in memory at a time; the least recently used adapter makes room for another.
    None: 20 on a CPU, 0 on a GPU, which reserves memory for them at the start."""

    max_adapter_rank: int = 64
    """Highest rank of a LoRA adapter, at most 256."""

    deterministic: bool = False
    """Make tokens independent of the rest of the batch (batch-invariant), at a price in speed."""

    load_format: str = "auto"
    """Format of the weights; ``dummy`` makes random weights for a config.json."""

    prefix_cache: bool = True
    """Reuse the KV cache of earlier prompts with the same prefix."""

    host_cache_bytes: int = 1 << 30
    """Main memory, in bytes, for blocks of preempted requests and for blocks unused for
    ``idle_offload_s``, until they are needed again; 0: none."""

    idle_offload_s: float = 30.0
    """Seconds that a block may be unused before it moves to main memory."""

    disk_cache_path: str = ""
    """Folder for blocks that do not fit in main memory or would be lost at a restart; each worker
    has a file there. Empty: none."""

    disk_cache_bytes: int = 10 << 30
    """Largest size in bytes of a worker's file, and of the files of other kinds without a worker.
    """

    object_cache_url: str = ""
    """Folder in an object store for blocks of long prompts, shared by all workers of the same kind:
    ``s3://bucket/path``, ``gs://bucket/path``, ``az://container/path`` or ``file:///path``.
    Credentials and endpoint come from the environment, such as ``AWS_ACCESS_KEY_ID`` and
    ``AWS_ENDPOINT_URL``. Workers remove nothing there: give the bucket a lifecycle rule. Empty:
    none. See docs/kv-cache.md."""

    object_cache_min_tokens: int = 1024
    """Shortest prefix, in tokens, that is written to the object store, and shortest prompt that is
    looked up there."""

    object_cache_requests: int = 8
    """Concurrent reads of the object store; a quarter as many writes run beside them."""

    object_cache_timeout_s: float = 10.0
    """Timeout of a request to the store in seconds; reads have at most 2 s, since requests wait
    no longer for them."""

    transfer: bool | None = None
    """Exchange blocks of the KV cache with other workers' engines: serve blocks, and pull them from
    workers that schedulers name. None: if possible. It needs Millrace's own engine,
    ``prefix_cache``, ``host_cache_bytes`` and weights that are not random. See docs/kv-cache.md."""

    transfer_any_ranks: bool = False
    """Also exchange blocks with workers of the same model whose group has other ranks, or whose
    processor, threads or kernels differ, for example between different prefill and decode workers.
    The blocks are re-sliced. Values from such a worker may differ in the last bit from local ones.
    Both sides need this setting."""

    transfer_address: str = ""
    """``host:port`` at which workers on other machines pull blocks and reach this worker; port 0 is
    any free port. Keep it to a private network of the cluster: the connection is not encrypted.
    Empty: only workers on this machine may pull."""

    transfer_transport: TransferTransport = "plain"
    """How blocks of peers are read: ``plain`` maps the memory of those on this machine and has the
    others send theirs by TCP; ``auto`` reads the memory of other workers by NIXL (RDMA if there is
    any) if both sides have it; ``nixl`` also does so on the same machine. It needs the package
    ``nixl`` (``millrace[rdma]``) and a private network: see docs/kv-cache.md."""

    ageing_s: float = 10.0
    """Waiting time in seconds that raises a request by one level of priority; 0: never."""

    grammar_helpers: int = 2
    """Grammars that are compiled at a time, each in its own thread and process. Tenants share the
    time; one tenant uses at most all helpers but one, so that another tenant's next grammar does
    not wait. At least 1."""

    itl_bound_ms: float = 0.0
    """Bound of the time between tokens in milliseconds: while other sequences decode, prompts are
    prefilled in chunks so that no step is predicted to take longer; 0: no bound."""


class WorkerConfig(Section, frozen=True, kw_only=True):
    """Settings of a worker process, which serves one model."""

    name: str = ""
    """Unique name of this worker that stays over restarts; empty: a random name at each start."""

    model: str = "demo"
    """Model to serve, by its name in the catalogue."""

    role: WorkerRole = WorkerRole.BOTH
    """Preferred work: a ``prefill`` worker computes long prompts, and their streams continue at a
    ``decode`` worker after the first token. Each role does the other's work if no other worker is
    available. See docs/kv-cache.md."""

    max_num_waiting: int = 8
    """Jobs that the worker accepts beyond its running jobs, so that a free slot never waits for
    the bus."""

    flush_interval_ms: float = 15.0
    """Milliseconds in which tokens are collected into a frame."""

    heartbeat_s: float = 0.5
    """Seconds between two heartbeats; twice as long while the worker is idle."""

    lease_extend_s: float = 2.0
    """Seconds between two extensions of its jobs' leases."""

    replay_memory_s: float = 120.0
    """Seconds that a finished answer is kept for gateways that missed a part of it."""

    sample_interval_s: float = 1.0
    """Seconds between two samples of load and memory for analytics while the worker is busy; an
    idle worker samples every half minute."""

    energy: bool = True
    """Read the device's counter of joules if there is one (NVML, RAPL). The counter covers the
    whole device, so enable it for one worker of a device only; see docs/cost.md."""

    powercap_path: str = "/sys/class/powercap"
    """Folder of RAPL's counters; a container may have them elsewhere."""

    drain_timeout_s: float = 8.0
    """Seconds that a stopping worker continues requests that no other worker takes over."""

    prefix_scope: Literal["tenant", "shared"] = "tenant"
    """Scope of cached prompt blocks. ``tenant``: only prompts of the same tenant reuse them
    (callers without a key are one tenant). ``shared``: all prompts reuse them, and callers can
    learn from the speed how other callers' prompts begin."""

    prefix_report_s: float = 0.1
    """Seconds between two reports of changes of the prefix cache to the schedulers; 0: never."""

    prefix_whole_s: float = 10.0
    """Seconds between two reports of the whole prefix cache."""

    max_reported_prefixes: int = 16_384
    """Most blocks in such a report."""

    engine: EngineConfig = EngineConfig()
    """The engine."""


class TierPolicy(Section, frozen=True, kw_only=True):
    """Policy of the scheduler for one tier. A job whose predicted first token is too late goes to a
    smaller model (``degrade``), else it is refused (``shed``), else it waits."""

    weight: float
    """Share of the workers relative to other tiers with waiting jobs. The tier ``batch`` has no
    share: it uses the capacity that other tiers leave."""

    ttft_bound_ms: float = 0.0
    """Predicted time to the first token that is too late; 0: none is."""

    degrade: bool = False
    """Give a late job to a smaller model, if its caller left the choice (``model: auto``)."""

    shed: bool = False
    """Refuse a late job."""

    @property
    def ttft_bound_s(self) -> float | None:
        """``ttft_bound_ms`` in seconds; None: no bound."""
        return self.ttft_bound_ms / 1e3 if self.ttft_bound_ms > 0 else None


class TierPolicies(Section, frozen=True, kw_only=True):
    """Policies of the scheduler, one for each tier."""

    enterprise: TierPolicy = TierPolicy(weight=8.0, ttft_bound_ms=5_000.0)
    pro: TierPolicy = TierPolicy(weight=4.0, ttft_bound_ms=10_000.0, degrade=True)
    free: TierPolicy = TierPolicy(weight=1.0, ttft_bound_ms=60_000.0, degrade=True, shed=True)
    batch: TierPolicy = TierPolicy(weight=1.0)


class AutoscaleConfig(Section, frozen=True, kw_only=True):
    """Settings of the autoscaler: a model has as many workers as its predicted wait and KV cache
    need, between ``min_workers`` and ``max_workers``."""

    min_workers: int = 1
    """Fewest workers of a model; 0: a model without requests has no workers."""

    max_workers: int = 0
    """Most workers of a model; 0: no autoscaling."""

    warm: int = 0
    """Loaded, idle workers of a model beyond its need, so that a burst does not wait for a worker
    to start."""

    target_wait_s: float = 2.0
    """Predicted wait of a job in seconds above which workers are added."""

    target_kv_share: float = 0.85
    """Share of the KV cache in use, 0 to 1, above which workers are added."""

    cold_start_s: float = 10.0
    """Seconds from a worker's start to its first job."""

    scale_down_after_s: float = 60.0
    """Seconds that fewer workers must have been enough before the number is lowered."""

    idle_s: float = 300.0
    """Seconds after its last job at which a model goes down to no workers, if ``min_workers`` is 0.
    """

    @property
    def is_on(self) -> bool:
        """True if the number of workers is scaled."""
        return self.max_workers > 0


class SchedulerConfig(Section, frozen=True, kw_only=True):
    """Settings of the scheduler: intake, order, placement, and the timeouts after which a worker or
    an attempt counts as lost."""

    scheduler_id: str = ""
    """Name of this scheduler; empty: a random name at each start."""

    models: tuple[str, ...] = ()
    """Models to schedule; empty: all of the catalogue."""

    max_queued_jobs: int = 2_000
    """Waiting jobs of a model above which the newest are shed, first those of the tenants with the
    longest queues. Jobs that services publish on the bus do not count."""

    window_jobs: int = 512
    """Jobs of a tier that a scheduler holds while all workers are busy; further jobs stay in the
    queue on the bus."""

    window_jobs_per_tenant: int = 8
    """Jobs of one tenant among these."""

    order: Literal["deadline", "shortest"] = "deadline"
    """Order of a tenant's jobs: ``deadline`` takes the earliest deadline first (then the earliest
    arrival), ``shortest`` the shortest predicted completion."""

    ageing_s: float = 10.0
    """Waiting time in seconds that halves a job's length in the order ``shortest``."""

    output_weight: float = 2.0
    """Weight of an output token in the fair shares, in input tokens."""

    placement: Literal["affine", "least_loaded"] = "affine"
    """Choice of a worker: ``affine`` weighs its cached prefixes against its load, ``least_loaded``
    uses its load alone."""

    max_prefix_keys: int = 1_000_000
    """Cached blocks of all workers that the scheduler remembers."""

    heartbeat_timeout_s: float = 2.0
    """Seconds without a heartbeat after which a worker counts as dead."""

    lease_extend_s: float = 2.0
    """Seconds between two extensions of a waiting job's lease."""

    dispatch_timeout_s: float = 1.0
    """Seconds that a worker has to accept a job."""

    resume_timeout_s: float = 0.5
    """Seconds that a gateway has to report the part of an answer that its client has."""

    max_attempts: int = 16
    """Lost attempts after which a job fails."""

    cancel_memory_s: float = 86_400.0
    """Seconds that the cancellation of a job is remembered if the job waits in the queue or has not
    arrived yet."""

    status_interval_s: float = 0.25
    """Seconds between two reports of its queues to the gateways, and between two checks for jobs to
    shed."""

    switch_roles: bool = False
    """Let schedulers change the roles of a model's ``prefill`` and ``decode`` workers
    (``worker.role``) if one role is short of workers and the other is not. See docs/kv-cache.md."""

    tiers: TierPolicies = TierPolicies()
    """Policy of each tier."""

    autoscale: AutoscaleConfig = AutoscaleConfig()
    """How many workers a model should have."""

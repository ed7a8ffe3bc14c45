"""The worker and its engine."""

from __future__ import annotations

from typing import Literal

from millrace.schemas.config.section import Section
from millrace.schemas.engines import EngineKind, WorkerRole
from millrace.schemas.redaction import Secret

TransferTransport = Literal["plain", "auto", "nixl"]


class SimulationConfig(Section, frozen=True, kw_only=True):
    """The simulated engine computes nothing and takes the time that a real one would. Its tokens
    follow from the seed and their index alone. A step that decodes takes ``step_ms +
    step_ms_per_sequence * sequences + step_ms_per_kv_token * KV tokens``. With
    ``worker.engine.tensor_parallel`` these times, and those of prompts, are divided by it, and each
    step takes ``collective_ms + collective_ms_per_token * tokens +
    collective_ms_per_sequence * sequences`` besides."""

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
    """The engine's bounds. 0 leaves a choice to the device: 384 tokens, 64 sequences and 1 GiB of
    KV cache on a CPU; 4,096 tokens, 256 sequences and what is left of ``gpu_memory_fraction`` on a
    GPU."""

    kind: EngineKind = EngineKind.REAL
    """``real`` is Millrace's own engine, ``simulated`` computes nothing (see
    ``worker.engine.simulation``); the others drive a server of another engine, see
    docs/engines.md."""

    simulation: SimulationConfig = SimulationConfig()
    """Times of the simulated engine."""

    url: str = ""
    """Where a server of another engine listens already; empty: the worker starts one."""

    command: str = ""
    """The program that starts such a server; empty: the usual one, from ``.engines`` (``make
    engines``) or the ``PATH``. Of a custom engine its class, as ``module:Class`` or
    ``file.py:Class``."""

    arguments: tuple[str, ...] = ()
    """What its command line has besides, such as ``--tensor-parallel-size 4``."""

    api_key: Secret = ""
    """What a server at ``url`` wants as bearer token."""

    served_name: str = ""
    """What a server at ``url`` calls the model; empty: the first one that it lists."""

    start_timeout_s: float = 600.0
    """How long such a server, or a rank, may take until it answers."""

    max_num_sequences: int = 0
    """Sequences that decode at a time; 0: by the device."""

    max_batch_tokens: int = 0
    """Tokens of the longest step; 0: by the device."""

    block_size_tokens: int = 16
    """Tokens of a block of the KV cache."""

    num_blocks: int = 0
    """Blocks of the KV cache; 0: as many as ``kv_cache_bytes`` has room for."""

    kv_cache_bytes: int = 0
    """Size of the KV cache; 0: by the device."""

    dtype: str = "auto"
    """Type of the weights in memory (``float32``, ``bfloat16``, ``float16``); ``auto``: by the
    checkpoint and the device."""

    quantization: str | None = None
    """Round wide weights when they are loaded: ``int8``, ``fp8`` (rows are rounded to the same) or
    ``int4`` (rows stay wide); none: as the checkpoint is. For Millrace's own engine; what a model's
    ``quantization`` in the catalogue says holds where this is none."""

    kv_cache_dtype: str = "auto"
    """Type of cached keys and values: ``auto`` like the weights; of 8 bits, with a scale for each
    head of each token, ``fp8`` (e4m3) on a GPU and ``int8`` on a CPU."""

    device: str = "auto"
    """``cpu``, ``cuda`` or ``cuda:N``; ``auto``: a GPU if there is one."""

    gpu_memory_fraction: float = 0.9
    """Share of a GPU's memory, above 0 to 1, for weights, work space and KV cache."""

    kernels: str = "auto"
    """``triton`` (CUDA), ``native`` (compiled, CPU; all products too), ``torch``, or ``reference``
    (plain torch in place of the Triton kernels); ``auto``: the fastest that the device has."""

    num_threads: int = 0
    """CPU threads of each rank; 0: by the machine and what else runs on it."""

    tensor_parallel: int = 1
    """Ranks that compute each layer together, each in a process and on a device of its own, with
    its slices of the weights and its heads of the KV cache; see docs/parallelism.md. Servers of
    other engines are started with it, and device time is that of so many devices."""

    pipeline_parallel: int = 1
    """Stages that compute some of the layers each, one behind the other, while another batch is in
    the next one: each of them ``tensor_parallel`` ranks; with GPUs all on one host."""

    remote_stages: int = 0
    """How many of these stages, the last ones, run on other hosts, each started there by
    ``millrace stages``; see docs/parallelism.md."""

    stages_address: str = "127.0.0.1:7500"
    """``host:port`` at which such hosts join. Beyond this machine it takes ``stages_token``; keep
    it to a network of the cluster's own all the same: nothing is encrypted."""

    stages_token: Secret = ""
    """What those who join have to know, and the worker, too: the same long random text on both
    sides. It is never sent."""

    expert_parallel: bool = False
    """Whether each of these ranks has some of a mixture's experts whole, rather than a slice of
    all of them."""

    collectives: str = "auto"
    """What ranks exchange numbers by: ``shared_memory`` (a CPU, one machine) or ``gloo``; ``auto``:
    shared memory where the compiled kernels are. Ranks with a GPU each exchange numbers by NCCL,
    and hear by either what to compute."""

    rank_timeout_s: float = 60.0
    """How long a rank waits for the others in the middle of a step before it gives them up, which
    ends all of them; they start anew, and requests go on."""

    cuda_graphs: bool = True
    """Replay recorded steps on a GPU."""

    overlap: bool = True
    """Launch a step before the results of the one before it are read."""

    speculation: str | bool | None = None
    """Whether tokens are proposed and checked several a step, which changes none of them: ``ngram``
    proposes what followed the same tokens before, what a grammar forces, and what a request
    predicts; ``draft=PATH`` these, and where they have nothing what the checkpoint at the path
    says; ``eagle3=PATH`` the same with the EAGLE-3 head at the path; ``off`` (or false) nothing;
    none: ``ngram``, and the checkpoint in a model's own folder ``draft`` if it has one, where a row
    is computed the same in all company, as the compiled kernels do in bfloat16 on a CPU, else
    ``off``; on a GPU ``off`` in any case. What a model's ``speculation`` in the catalogue says
    holds where this is none. See docs/speculation.md."""

    max_adapters: int | None = None
    """LoRA adapters that are in memory at a time, the least recently used making room for others;
    none: 20 on a CPU, 0 on a GPU, whose memory for them is set apart at the start."""

    max_adapter_rank: int = 64
    """The highest rank of such an adapter, at most 256."""

    deterministic: bool = False
    """Make tokens independent of the rest of the batch, at a price in speed."""

    load_format: str = "auto"
    """``dummy`` makes random weights for a config.json."""

    prefix_cache: bool = True
    """Let prompts begin with what earlier ones left in the KV cache."""

    host_cache_bytes: int = 1 << 30
    """Main memory for blocks of preempted requests and for blocks unused for
    ``idle_offload_s``, until they are needed again; 0: none."""

    idle_offload_s: float = 30.0
    """How long a block may be unused before it moves to main memory."""

    disk_cache_path: str = ""
    """Folder for blocks that main memory has no more room for, or a restart would lose; each worker
    has a file there. Empty: none."""

    disk_cache_bytes: int = 10 << 30
    """Most bytes of a worker's file, and of those of other kinds that no worker holds."""

    object_cache_url: str = ""
    """Folder in an object store for blocks of long prompts, which all workers of the same kind
    share: ``s3://bucket/path``, ``gs://bucket/path``, ``az://container/path`` or ``file:///path``.
    Credentials and endpoint are those of the environment, such as ``AWS_ACCESS_KEY_ID`` and
    ``AWS_ENDPOINT_URL``. Nothing is removed there: give the bucket a lifecycle rule. Empty: none.
    See docs/kv-cache.md."""

    object_cache_min_tokens: int = 1024
    """The shortest prefix that is written there, and the shortest prompt that is looked for."""

    object_cache_requests: int = 8
    """Objects that are read at a time; a quarter as many are written besides."""

    object_cache_timeout_s: float = 10.0
    """How long a request to the store may take; one that reads 2 s at most, which is as long as
    anybody waits for it."""

    transfer: bool | None = None
    """Whether blocks of the KV cache are handed to other workers' engines, and pulled from those
    that schedulers name; none: where it can be. It takes Millrace's own engine, ``prefix_cache``,
    ``host_cache_bytes`` and weights that are not random. See docs/kv-cache.md."""

    transfer_any_ranks: bool = False
    """Exchange blocks, too, with workers of the same model whose group has other ranks, or whose
    processor, threads or kernels differ, as between prefill and decode workers that are unlike:
    they are re-sliced. What such a worker computed may differ in the last bit from what would be
    computed here. Both sides need it."""

    transfer_address: str = ""
    """``host:port`` at which workers on other machines may pull them, by which these reach it, too;
    port 0 is any that is free. Keep it to a network of the cluster's own: nothing is encrypted.
    Empty: only those on this machine may."""

    transfer_transport: TransferTransport = "plain"
    """How blocks of peers are read: ``plain`` maps the memory of those on this machine and has the
    others send theirs by TCP; ``auto`` reads the memory of others by NIXL (RDMA, where there is
    some), if both sides have it, and ``nixl`` that on this machine, too. It needs the package
    ``nixl`` (``millrace[rdma]``), and a network that nobody else is on: see docs/kv-cache.md."""

    ageing_s: float = 10.0
    """Wait for which a request gains a level of priority; 0: never."""

    grammar_helpers: int = 2
    """Grammars that are compiled at a time, each with a thread and a process of its own. Tenants
    share the time; one tenant has one helper less than there are, so that another's next grammar
    does not wait. At least 1."""

    itl_bound_ms: float = 0.0
    """Time between tokens to keep: while others decode, chunks of prompts are cut so that a step is
    predicted to take no longer; 0: no bound."""


class WorkerConfig(Section, frozen=True, kw_only=True):
    """One worker process, which serves one model."""

    name: str = ""
    """A name of this worker alone that stays over restarts, where something gives it one; empty:
    one is drawn at start."""

    model: str = "demo"
    """The model to serve, by its name in the catalogue."""

    role: WorkerRole = WorkerRole.BOTH
    """What work it is preferred for: ``prefill`` computes long prompts, whose streams go on at a
    ``decode`` worker once their first token is out; each takes the other's where there is nobody
    else. See docs/kv-cache.md."""

    max_num_waiting: int = 8
    """Jobs that the worker accepts beyond those that run, so that a free slot never waits for the
    bus."""

    flush_interval_ms: float = 15.0
    """How long tokens are gathered into a frame."""

    heartbeat_s: float = 0.5
    """How often the worker announces its state; half as often while it has nothing to do."""

    lease_extend_s: float = 2.0
    """How often the leases of its jobs are extended."""

    replay_memory_s: float = 120.0
    """How long a finished answer is kept for gateways that missed a part of it."""

    sample_interval_s: float = 1.0
    """How often load and memory are recorded for analytics while the worker has something to do; at
    rest they are each half minute."""

    energy: bool = True
    """Whether the device's counter of joules is read where there is one (NVML, RAPL): it counts all
    that the device takes, so leave it to one worker of a device, see docs/cost.md."""

    powercap_path: str = "/sys/class/powercap"
    """Where RAPL's counters are; a container may have them elsewhere."""

    drain_timeout_s: float = 8.0
    """How long a worker that stops finishes what no other worker takes over."""

    prefix_scope: Literal["tenant", "shared"] = "tenant"
    """Whose prompts may begin with cached blocks of another: with ``tenant`` only those of the same
    tenant (callers without a key are one); with ``shared`` all, who can then learn from the speed
    what others' prompts begin with."""

    prefix_report_s: float = 0.1
    """How often changes of the prefix cache are reported to the schedulers; 0: never."""

    prefix_whole_s: float = 10.0
    """How often all of it is reported."""

    max_reported_prefixes: int = 16_384
    """Blocks that such a report names at most."""

    engine: EngineConfig = EngineConfig()
    """The engine."""


class TierPolicy(Section, frozen=True, kw_only=True):
    """How a scheduler treats a tier. A job whose first token is predicted too late goes to a
    smaller model (``degrade``), else it is refused (``shed``), else it waits."""

    weight: float
    """Share of the workers against other tiers with waiting jobs. Batch work has none: it gets what
    the others leave."""

    ttft_bound_ms: float = 0.0
    """Predicted time to the first token that is too late; 0: none is."""

    degrade: bool = False
    """Give a late job to a smaller model, if its caller left the choice (``model: auto``)."""

    shed: bool = False
    """Refuse a late job."""

    @property
    def ttft_bound_s(self) -> float | None:
        """``ttft_bound_ms`` in seconds. None: no job is late."""
        return self.ttft_bound_ms / 1e3 if self.ttft_bound_ms > 0 else None


class TierPolicies(Section, frozen=True, kw_only=True):
    """One policy for each tier."""

    enterprise: TierPolicy = TierPolicy(weight=8.0, ttft_bound_ms=5_000.0)
    pro: TierPolicy = TierPolicy(weight=4.0, ttft_bound_ms=10_000.0, degrade=True)
    free: TierPolicy = TierPolicy(weight=1.0, ttft_bound_ms=60_000.0, degrade=True, shed=True)
    batch: TierPolicy = TierPolicy(weight=1.0)


class AutoscaleConfig(Section, frozen=True, kw_only=True):
    """How many workers a model should have: as many as its predicted wait and KV cache need, within
    two bounds."""

    min_workers: int = 1
    """Fewest workers of a model; 0: a model that nobody uses has none."""

    max_workers: int = 0
    """Most workers of a model; 0: no autoscaling."""

    warm: int = 0
    """Workers of a model beyond those that it needs, loaded and idle, for a burst that is not to
    wait for a start."""

    target_wait_s: float = 2.0
    """Predicted wait of a job above which there should be more workers."""

    target_kv_share: float = 0.85
    """Share of the KV cache in use, 0 to 1, above which there should be more workers."""

    cold_start_s: float = 10.0
    """What a worker takes from its start to its first job."""

    scale_down_after_s: float = 60.0
    """How long fewer workers must have been enough before their number goes down."""

    idle_s: float = 300.0
    """How long after its last job a model goes down to none, where ``min_workers`` is 0."""

    @property
    def is_on(self) -> bool:
        """Whether the number of workers is scaled."""
        return self.max_workers > 0


class SchedulerConfig(Section, frozen=True, kw_only=True):
    """The scheduler: intake, order, placement, and when a worker or an attempt counts as lost."""

    scheduler_id: str = ""
    """Name of this scheduler; empty: one is drawn at start."""

    models: tuple[str, ...] = ()
    """Models to schedule; empty: all of the catalogue."""

    max_queued_jobs: int = 2_000
    """Waiting jobs of a model above which the newest are shed, those of the tenants with the
    longest queues first. Jobs that services publish on the bus do not count."""

    window_jobs: int = 512
    """Jobs of a tier that a scheduler holds while all workers are busy; the others stay in the
    queue on the bus."""

    window_jobs_per_tenant: int = 8
    """Jobs of a tenant that it holds of these."""

    order: Literal["deadline", "shortest"] = "deadline"
    """Which job of a tenant comes first: the one with the earliest deadline (then the earliest
    arrival), or with the shortest predicted completion."""

    ageing_s: float = 10.0
    """Wait that is worth half the length in the order ``shortest``."""

    output_weight: float = 2.0
    """What an output token costs in the fair shares, in input tokens."""

    placement: Literal["affine", "least_loaded"] = "affine"
    """How a worker is chosen: its cached prefixes weighed against its load, or its load alone."""

    max_prefix_keys: int = 1_000_000
    """Cached blocks of all workers that the scheduler remembers."""

    heartbeat_timeout_s: float = 2.0
    """How long a worker may be silent before it counts as dead."""

    lease_extend_s: float = 2.0
    """How often the lease of a waiting job is extended."""

    dispatch_timeout_s: float = 1.0
    """How long a worker may take to accept a job."""

    resume_timeout_s: float = 0.5
    """How long a gateway may take to say what of an answer its client has."""

    max_attempts: int = 16
    """Lost attempts at which a job fails."""

    cancel_memory_s: float = 86_400.0
    """How long the cancel of a job that waits in the queue, or has not come yet, is remembered."""

    status_interval_s: float = 0.25
    """How often the scheduler announces its queues to the gateways, and looks for what to shed."""

    switch_roles: bool = False
    """Whether schedulers change the roles of a model's workers (``worker.role``) that are
    ``prefill`` or ``decode``, where one role is short of workers and the other is not. See
    docs/kv-cache.md."""

    tiers: TierPolicies = TierPolicies()
    """Policy of each tier."""

    autoscale: AutoscaleConfig = AutoscaleConfig()
    """How many workers a model should have."""

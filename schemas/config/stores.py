"""Where NATS, Redis, Kafka and ClickHouse are, who we are to them, and what they keep."""

from __future__ import annotations

from typing import Literal

from millrace.schemas.config.section import Section, TlsSettings
from millrace.schemas.redaction import Secret


class NatsConfig(TlsSettings, frozen=True, kw_only=True):
    """The bus. One of ``user`` with ``password``, ``token``, ``nkey_seed`` and ``creds_file`` says
    who we are."""

    url: str = "nats://127.0.0.1:4222"
    """One server or several, comma separated; ``tls://`` demands TLS, as the PEM files do."""

    user: str = ""
    """User name."""

    password: Secret = ""
    """Password of ``user``."""

    token: Secret = ""
    """Token."""

    nkey_seed: Secret = ""
    """Seed of an NKey."""

    creds_file: str = ""
    """File with a user's JWT and seed, read again at each connect."""

    inbox_prefix: str = ""
    """Prefix of the subjects on which replies come to us, which the server may let only one user
    read; empty: that of the process's part (see ``bus.nats.permissions``)."""

    connect_timeout_s: float = 5.0
    """How long a process tries to connect when it starts, and an administrative call waits for a
    lost connection."""

    replicas: int = 1
    """Servers of the cluster that keep a copy of each stream and bucket. A scheduler applies it to
    streams that are there; the default, as of any limit of a stream, never shrinks one."""

    ack_wait_s: float = 6.0
    """The lease: how long the job of a holder that has died waits before it is delivered again."""

    max_deliver: int = 8
    """Deliveries of a job; after as many without an end it goes to the dead letters."""

    max_stored_jobs: int = 4_000_000
    """Jobs that the queue holds, of all models; a publisher of more is refused. Above what one
    tenant's services may have waiting (``max_waiting_jobs`` of the tier ``batch``), so that no
    tenant fills it alone."""

    results_ttl_s: float = 86_400.0
    """How long the results of asynchronous jobs are kept."""

    files_ttl_s: float = 30 * 86_400.0
    """How long uploaded files, batches and their results are kept."""

    outbox_max_age_s: float = 7 * 86_400.0
    """How long records wait for Kafka at most, and can be replayed."""


class RedisConfig(TlsSettings, frozen=True, kw_only=True):
    """Request state, limits, keys, sessions. With ``sentinels`` these say which server is the
    master now, and ``url`` is used for its database and TLS only."""

    url: str = "redis://127.0.0.1:6379/0"
    """Server and database; ``rediss://`` demands TLS, as the PEM files do."""

    user: str = ""
    """A user of Redis's access control list; without it ``password`` is the default user's."""

    password: Secret = ""
    """Password of the user."""

    sentinels: tuple[str, ...] = ()
    """Addresses of the Sentinels, ``host:port`` each."""

    sentinel_master: str = ""
    """The name under which the Sentinels know the master."""

    sentinel_user: str = ""
    """User name at the Sentinels."""

    sentinel_password: Secret = ""
    """Password at the Sentinels."""


class KafkaConfig(TlsSettings, frozen=True, kw_only=True):
    """The log of records, which analytics reads."""

    bootstrap_servers: str = "127.0.0.1:9092"
    """Brokers to ask first, ``host:port`` each, comma separated."""

    tls: bool = False
    """Demand TLS, as the PEM files do."""

    sasl_mechanism: Literal["", "PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] = ""
    """How ``user`` and ``password`` are proved; empty: not at all. PLAIN shows the password to
    whoever reads along, so it wants TLS."""

    user: str = ""
    """User name."""

    password: Secret = ""
    """Password of ``user``."""

    partitions: int = 3
    """Partitions of the record topics, when they are created."""

    replication_factor: int = 1
    """Brokers that keep a copy of each partition, when the topics are created."""

    group: str = "millrace-sink"
    """Consumer group of the processes that write rows."""

    server: Literal["embedded", "apache"] = "embedded"
    """Which Kafka ``millrace up`` starts: a stand-in in memory for clients of librdkafka and
    aiokafka, or Apache Kafka, which needs Java 17 and serves all clients."""

    maven_url: str = "https://repo1.maven.org/maven2"
    """Maven repository from which ``millrace up`` fetches Apache Kafka, once for a machine."""


class ClickHouseConfig(TlsSettings, frozen=True, kw_only=True):
    """Where rows go: a server at ``url``, or an embedded store at ``path`` that the telemetry
    process owns and serves to others on ``serve_host`` and ``serve_port``."""

    url: str = ""
    """URL of a server; ``https://`` for TLS, by the PEM files."""

    path: str = ""
    """Folder of the embedded store."""

    database: str = "millrace"
    """Database of the tables."""

    username: str = "default"
    """User name at the server."""

    password: Secret = ""
    """Password of ``username``."""

    serve_host: str = "127.0.0.1"
    """Address on which the embedded store answers ClickHouse's HTTP interface."""

    serve_port: int = 8123
    """Port of that interface."""

    analyst_username: str = "analyst"
    """Name of a second user of that interface, who reads all tables but ``transcripts``."""

    analyst_password: Secret = ""
    """Password of ``analyst_username``; empty: there is no such user."""

    max_query_s: int = 60
    """Seconds after which a query of that interface is ended."""

    max_query_memory_bytes: int = 512 * 1024 * 1024
    """Memory of one query; a query that needs more is ended. GROUP BY and ORDER BY use the disk
    from a quarter of it on."""

    max_queries_memory_bytes: int = 1024 * 1024 * 1024
    """Memory of all queries together; from half of it on, the query with the most memory is
    ended."""

    max_queries: int = 16
    """Queries of that interface that run at once; others wait."""

    max_queries_per_user: int = 6
    """Queries of one user at one address that run at once."""

    max_query_wait_s: float = 10.0
    """How long a query waits for its turn before it is refused."""


class StorageConfig(Section, frozen=True, kw_only=True):
    """Free space on the disks of the stores whose folders this process can see (``millrace up``
    knows them; empty: not watched)."""

    nats_dir: str = ""
    """Data folder of NATS."""

    redis_dir: str = ""
    """Data folder of Redis."""

    kafka_dir: str = ""
    """Data folder of Kafka."""

    clickhouse_dir: str = ""
    """Data folder of ClickHouse."""

    min_free_bytes: int = 128 * 1024 * 1024
    """Free space on NATS's disk below which gateways accept nothing new: what is left is for what
    was accepted. Below half of it the queue itself refuses jobs, whoever publishes them."""

    check_interval_s: float = 1.0
    """How often the disks are looked at; up to five times less often while they have so much room
    that nothing could fill them meanwhile."""


class ArtifactsConfig(Section, frozen=True, kw_only=True):
    """Copies of models and adapters that are in object stores, shared by all processes of a
    machine."""

    path: str = ""
    """Their folder; empty: ``millrace/artifacts`` in ``$XDG_CACHE_HOME`` or ``~/.cache``."""

    max_bytes: int = 200 * 1024**3
    """How much of them stays; what was used least recently goes first."""

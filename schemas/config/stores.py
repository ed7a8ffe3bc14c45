"""Settings of NATS, Redis, Kafka and ClickHouse: addresses, credentials and retention."""

from __future__ import annotations

from typing import Literal

from millrace.schemas.config.section import Section, TlsSettings
from millrace.schemas.redaction import Secret


class NatsConfig(TlsSettings, frozen=True, kw_only=True):
    """Settings of the bus. Credentials are one of: ``user`` with ``password``, ``token``,
    ``nkey_seed``, ``creds_file``."""

    url: str = "nats://127.0.0.1:4222"
    """Server address, or several, comma separated; ``tls://`` requires TLS, as the PEM files do."""

    user: str = ""
    """User name."""

    password: Secret = ""
    """Password of ``user``."""

    token: Secret = ""
    """Token."""

    nkey_seed: Secret = ""
    """Seed of an NKey."""

    creds_file: str = ""
    """File with a user's JWT and seed, read again at each connection."""

    inbox_prefix: str = ""
    """Prefix of the subjects for replies to this process; the server can restrict them to one user.
    Empty: the prefix of the process's part (see ``bus.nats.permissions``)."""

    connect_timeout_s: float = 5.0
    """Seconds that a starting process tries to connect, and that an administrative call waits for a
    lost connection."""

    replicas: int = 1
    """Servers of the cluster that keep a copy of each stream and bucket. A scheduler also applies
    it to existing streams; the default never shrinks a stream, nor does the default of any other
    limit of a stream."""

    ack_wait_s: float = 6.0
    """Lease in seconds: time until the job of a dead lease holder is redelivered."""

    max_deliver: int = 8
    """Deliveries of a job; a job without an end after that many becomes a dead letter."""

    max_stored_jobs: int = 4_000_000
    """Jobs that the queue holds, of all models; the queue refuses further jobs. It is larger than
    the limit of waiting jobs of one tenant's services (``max_waiting_jobs`` of the tier ``batch``),
    so that no tenant fills the queue alone."""

    results_ttl_s: float = 86_400.0
    """Seconds that the results of asynchronous jobs are kept."""

    files_ttl_s: float = 30 * 86_400.0
    """Seconds that uploaded files, batches and their results are kept."""

    outbox_max_age_s: float = 7 * 86_400.0
    """Seconds that records wait for Kafka at most, and can be replayed."""


class RedisConfig(TlsSettings, frozen=True, kw_only=True):
    """Settings of Redis: request state, limits, keys, sessions. With ``sentinels``, the sentinels
    name the current master, and ``url`` only gives the database and TLS."""

    url: str = "redis://127.0.0.1:6379/0"
    """Server and database; ``rediss://`` requires TLS, as the PEM files do."""

    user: str = ""
    """User of Redis's access control list; empty: ``password`` is the default user's."""

    password: Secret = ""
    """Password of the user."""

    sentinels: tuple[str, ...] = ()
    """Addresses of the Sentinels, ``host:port`` each."""

    sentinel_master: str = ""
    """Name of the master at the Sentinels."""

    sentinel_user: str = ""
    """User name at the Sentinels."""

    sentinel_password: Secret = ""
    """Password at the Sentinels."""


class KafkaConfig(TlsSettings, frozen=True, kw_only=True):
    """Settings of Kafka, the log of records that analytics reads."""

    bootstrap_servers: str = "127.0.0.1:9092"
    """First brokers to contact, ``host:port`` each, comma separated."""

    tls: bool = False
    """Require TLS, as the PEM files do."""

    sasl_mechanism: Literal["", "PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] = ""
    """SASL mechanism for ``user`` and ``password``; empty: no authentication. PLAIN sends the
    password in clear text, so use it with TLS only."""

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
    """Kafka that ``millrace up`` starts: ``embedded`` is a stand-in in memory for clients of
    librdkafka and aiokafka; ``apache`` is Apache Kafka, which needs Java 17 and serves all clients.
    """

    maven_url: str = "https://repo1.maven.org/maven2"
    """Maven repository from which ``millrace up`` downloads Apache Kafka, once per machine."""


class ClickHouseConfig(TlsSettings, frozen=True, kw_only=True):
    """Settings of ClickHouse: a server at ``url``, or an embedded store at ``path``. The telemetry
    process owns the embedded store and serves it to other processes on ``serve_host`` and
    ``serve_port``."""

    url: str = ""
    """URL of a server; ``https://`` for TLS with the PEM files."""

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
    """Name of a second user of that interface, which reads all tables but ``transcripts``."""

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
    """Seconds that a query waits for its turn before it is refused."""


class StorageConfig(Section, frozen=True, kw_only=True):
    """Free space on the disks of the stores whose folders this process can see. ``millrace up``
    sets the folders; an empty folder is not watched."""

    nats_dir: str = ""
    """Data folder of NATS."""

    redis_dir: str = ""
    """Data folder of Redis."""

    kafka_dir: str = ""
    """Data folder of Kafka."""

    clickhouse_dir: str = ""
    """Data folder of ClickHouse."""

    min_free_bytes: int = 128 * 1024 * 1024
    """Free space on NATS's disk below which gateways accept no new requests; the rest is reserved
    for accepted requests. Below half of it the queue itself refuses jobs from every publisher."""

    check_interval_s: float = 1.0
    """Seconds between two checks of the disks; up to five times as long while they have so much
    free space that they cannot fill up in between."""


class ArtifactsConfig(Section, frozen=True, kw_only=True):
    """Local copies of models and adapters from object stores, shared by a machine's processes."""

    path: str = ""
    """Folder of the copies; empty: ``millrace/artifacts`` in ``$XDG_CACHE_HOME`` or ``~/.cache``.
    """

    max_bytes: int = 200 * 1024**3
    """Largest total size in bytes; the least recently used copies are removed first."""

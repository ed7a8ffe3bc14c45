"""Typed configuration tree, with a file for each group of sections.

Every process imports its own sections from here, and ``runtime.settings`` reads ``Config`` from a
file and from environment variables. This package imports ``schemas`` only.
``docs/configuration.md`` is generated from the texts here.
"""

from __future__ import annotations

from millrace.schemas.config.gateway import GatewayConfig, SessionContexts
from millrace.schemas.config.section import Section
from millrace.schemas.config.stores import (
    ArtifactsConfig,
    ClickHouseConfig,
    KafkaConfig,
    NatsConfig,
    RedisConfig,
    StorageConfig,
)
from millrace.schemas.config.telemetry import (
    MetricsConfig,
    SloConfig,
    TelemetryConfig,
    TracingConfig,
)
from millrace.schemas.config.worker import (
    AutoscaleConfig,
    EngineConfig,
    SchedulerConfig,
    SimulationConfig,
    TierPolicies,
    TierPolicy,
    WorkerConfig,
)

__all__ = [
    "ArtifactsConfig",
    "AutoscaleConfig",
    "ClickHouseConfig",
    "Config",
    "EngineConfig",
    "GatewayConfig",
    "KafkaConfig",
    "MetricsConfig",
    "NatsConfig",
    "RedisConfig",
    "SchedulerConfig",
    "SessionContexts",
    "SimulationConfig",
    "SloConfig",
    "StorageConfig",
    "TelemetryConfig",
    "TierPolicies",
    "TierPolicy",
    "TracingConfig",
    "WorkerConfig",
]


class Config(Section, frozen=True, kw_only=True):
    """Every setting of a Millrace process."""

    catalogue: str = ""
    """Path of a models.yaml; empty: the built-in catalogue with the demo model."""

    control_tokens_in_content: bool = False
    """Whether messages, results and descriptions of tools may spell control tokens of a model, such
    as ``<|im_end|>``. Off: their text stays text, and only the model's chat template makes control
    tokens. On: anyone who can write into a prompt can forge a turn of it. Gateways and schedulers
    need the same value."""

    log_level: str = "info"
    """Least severe log line that is written: ``debug``, ``info``, ``warning`` or ``error``."""

    nats: NatsConfig = NatsConfig()
    redis: RedisConfig = RedisConfig()
    kafka: KafkaConfig = KafkaConfig()
    clickhouse: ClickHouseConfig = ClickHouseConfig()
    gateway: GatewayConfig = GatewayConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    worker: WorkerConfig = WorkerConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    storage: StorageConfig = StorageConfig()
    artifacts: ArtifactsConfig = ArtifactsConfig()
    slo: SloConfig = SloConfig()
    metrics: MetricsConfig = MetricsConfig()
    tracing: TracingConfig = TracingConfig()

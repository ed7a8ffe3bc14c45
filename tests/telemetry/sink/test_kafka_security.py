"""Apache Kafka with TLS, users and certificates of both sides: all of our clients go through."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from aiokafka import ConsumerRebalanceListener
from msgspec.structs import replace

from millrace.bus import subjects
from millrace.bus.memory import MemoryBroker, MemoryBus
from millrace.schemas.config import KafkaConfig
from millrace.schemas.errors import (
    ConfigError,
    CredentialsRefusedError,
    MillraceError,
    UntrustedServerError,
)
from millrace.telemetry.kafka.kafka import ensure_topics, make_producer, start_consumer, stop_client
from millrace.telemetry.kafka.security import connection_options
from millrace.telemetry.store.store import Store
from tests.support.certificates import Authority, Pair
from tests.support.kafka import SecureKafkaBroker, missing_tool
from tests.support.waiting import eventually
from tests.telemetry.pipeline import count, running
from tests.telemetry.records import request_record

pytestmark = [
    pytest.mark.kafka,
    pytest.mark.timeout(240),
    pytest.mark.skipif(missing_tool() is not None, reason=f"{missing_tool()} is not installed"),
]

USER, PASSWORD = "millrace", "correct-horse"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def broker(
    tmp_path_factory: pytest.TempPathFactory, authority: Authority
) -> Iterator[SecureKafkaBroker]:
    started = SecureKafkaBroker(tmp_path_factory.mktemp("kafka"), authority, {USER: PASSWORD})
    started.start()
    yield started
    started.stop()


@pytest.fixture
def by_password(broker: SecureKafkaBroker, authority: Authority) -> KafkaConfig:
    return KafkaConfig(
        bootstrap_servers=f"127.0.0.1:{broker.sasl_port}",
        ca_file=str(authority.certificate),
        sasl_mechanism="SCRAM-SHA-512",
        user=USER,
        password=PASSWORD,
    )


def by_certificate(broker: SecureKafkaBroker, authority: Authority, pair: Pair) -> KafkaConfig:
    return KafkaConfig(
        bootstrap_servers=f"127.0.0.1:{broker.mutual_port}",
        ca_file=str(authority.certificate),
        certificate_file=str(pair.certificate),
        key_file=str(pair.key),
    )


async def works(config: KafkaConfig) -> None:
    """Topics are looked after, a record is written, and read by a member of a group."""
    config = replace(config, group=f"group-{config.sasl_mechanism}-{config.bootstrap_servers}")
    assert await ensure_topics(config)
    producer = make_producer(config)
    await producer.start()
    try:
        await producer.send_and_wait(subjects.RECORD_TOPICS[0], b"a record")
    finally:
        await stop_client(producer)
    consumer = await start_consumer(config, manages_groups=True, listener=_Listener())
    try:
        message = await consumer.getone()
        assert message.value is not None
    finally:
        await stop_client(consumer)


class _Listener(ConsumerRebalanceListener):  # type: ignore[misc]
    def on_partitions_revoked(self, revoked: object) -> None:
        pass

    def on_partitions_assigned(self, assigned: object) -> None:
        pass


async def refused(config: KafkaConfig, kind: type[MillraceError], *messages: str) -> None:
    with pytest.raises(kind) as raised:
        await ensure_topics(config)
    for word in messages:
        assert word in raised.value.message, raised.value.message
    assert not config.password or config.password not in raised.value.message


async def test_records_land_over_tls_with_a_password(
    store: Store, by_password: KafkaConfig
) -> None:
    bus = MemoryBus(MemoryBroker())
    async with running(bus, store, by_password):
        for number in range(50):
            await bus.outbox.publish(request_record(number, seed=1))

        async def landed() -> bool:
            return await count(store, "requests_once") == 50

        await eventually(landed, 60.0, "50 requests")


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"])
async def test_each_mechanism_lets_the_user_in(by_password: KafkaConfig, mechanism: str) -> None:
    config = replace(by_password, sasl_mechanism=mechanism)
    await works(config)
    wrong = replace(config, password="wrong-horse")
    await refused(wrong, CredentialsRefusedError, "kafka.password", f"kafka.user {USER}")


async def test_certificates_of_both_sides(
    broker: SecureKafkaBroker, authority: Authority, tmp_path: Path
) -> None:
    mine = by_certificate(broker, authority, authority.sign("telemetry"))
    await works(mine)
    stranger = by_certificate(broker, authority, Authority(tmp_path, "Another").sign("stranger"))
    await refused(stranger, CredentialsRefusedError, "our certificate")
    none = replace(mine, certificate_file="", key_file="")
    await refused(none, CredentialsRefusedError, "without a certificate")


async def test_servers_that_are_not_to_be_trusted(
    by_password: KafkaConfig, broker: SecureKafkaBroker, tmp_path: Path
) -> None:
    other = Authority(tmp_path, "Another")
    for config in (
        replace(by_password, ca_file=str(other.certificate)),
        replace(by_password, ca_file="", tls=True),
    ):
        await refused(config, UntrustedServerError, "no trusted authority", "kafka.ca_file")
    by_name = replace(by_password, bootstrap_servers=f"localhost:{broker.sasl_port}")
    await refused(by_name, UntrustedServerError, "another name")
    expired = replace(by_password, bootstrap_servers=f"127.0.0.1:{broker.expired_port}")
    await refused(expired, UntrustedServerError, "has expired")
    plain = replace(by_password, bootstrap_servers=broker.bootstrap_servers)
    await refused(plain, UntrustedServerError, "it has no TLS")


async def test_one_server_of_several_is_enough(
    by_password: KafkaConfig, broker: SecureKafkaBroker
) -> None:
    both = f"127.0.0.1:{broker.expired_port},{by_password.bootstrap_servers}"
    await works(replace(by_password, bootstrap_servers=both))


def test_settings_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match=r"kafka\.ca_file"):
        connection_options(KafkaConfig(ca_file="/nowhere/ca.pem"))
    with pytest.raises(ConfigError, match=r"kafka\.certificate_file"):
        connection_options(KafkaConfig(certificate_file="/nowhere", key_file="/nowhere"))

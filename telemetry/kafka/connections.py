"""Connections of aiokafka's clients: their errors, and the end of one whose broker is dead."""

from __future__ import annotations

from typing import Any

from aiokafka import client
from aiokafka.conn import AIOKafkaConnection, create_conn
from aiokafka.errors import KafkaError

from millrace.runtime.faults.connections import ConnectionErrors, bound_silence

# A broker may answer late; its machine still acknowledges keepalive probes.
_SILENCE_S = 10.0
_ERRORS = ConnectionErrors(KafkaError)


async def connect(*arguments: Any, **options: Any) -> AIOKafkaConnection:
    """As ``aiokafka.conn.create_conn``; raises KafkaError or OSError and nothing else."""
    with _ERRORS:
        connection = await create_conn(*arguments, **options)
        bound_silence(connection._writer.get_extra_info("socket"), _SILENCE_S)
    return connection


def install() -> None:
    """Replace the connect function of aiokafka in this process: aiokafka has no option for it."""
    client.create_conn = connect

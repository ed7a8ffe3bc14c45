"""Records of earlier and later versions, as rows of their known fields."""

from __future__ import annotations

from base64 import b64decode
from decimal import Decimal

import msgspec

from millrace.bus.memory import MemoryBroker, MemoryBus
from millrace.schemas.config import KafkaConfig
from millrace.schemas.records import RECORD_VERSION
from millrace.telemetry.store.store import Store
from tests.support.waiting import eventually
from tests.telemetry.pipeline import dead_letters, running
from tests.telemetry.records import delivery_record, request_record, worker_sample
from tests.telemetry.stores import POLL_S

# As version 1 wrote them, without what version 2 added. Their time is in 2090, so that no table
# finds them too old.
REQUEST_1 = (
    "3gAgpHR5cGWncmVxdWVzdKpyZXF1ZXN0X2lkqnYxLXJlcXVlc3SmdGVuYW50pGFjbWWkdXNlcqZ1c2VyLTGqc2Vzc2lv"
    "bl9pZKNzLTGmc291cmNlpGh0dHCkdGllcqNwcm+vbW9kZWxfcmVxdWVzdGVkpGRlbW+sbW9kZWxfc2VydmVkpGRlbW+s"
    "cm91dGVfcmVhc29uoKl3b3JrZXJfaWSjdy0xp2FkYXB0ZXKgrXByb21wdF90b2tlbnMMrWNhY2hlZF90b2tlbnMEsWNv"
    "bXBsZXRpb25fdG9rZW5zIqhxdWV1ZV9tc8s/+AAAAAAAAKd0dGZ0X21zy0A0QAAAAAAAp3Rwb3RfdXPLQLOIAAAAAACo"
    "dG90YWxfbXPLQGfQAAAAAACtZmluaXNoX3JlYXNvbqRzdG9wpnN0YXR1c6Rkb25lqmVycm9yX2NvZGWgpGNvc3SuMC4w"
    "MDAwMjIyMDAwMDCoY3VycmVuY3mjVVNErXByaWNlX3ZlcnNpb26nMjAyNi0wMatyZWNlaXZlZF9uc880vE/d4nwAAKpz"
    "dGFydGVkX25zzzS8T93ikuNgrmZpcnN0X3Rva2VuX25zzzS8T93jsP2Qp2RvbmVfbnPPNLxP3e3WzKClZXBvY2gBr251"
    "bV9wcmVlbXB0aW9ucwCndmVyc2lvbgE="
)
DELIVERY_1 = (
    "jaR0eXBlqGRlbGl2ZXJ5qnJlcXVlc3RfaWSqdjEtcmVxdWVzdKpnYXRld2F5X2lko2ctMaZ0ZW5hbnSkYWNtZaZzb3Vy"
    "Y2WkaHR0cK1maXJzdF9ieXRlX21zy0A1gAAAAAAAqHRvdGFsX21zy0Bn4AAAAAAAsHRva2Vuc19kZWxpdmVyZWQiq251"
    "bV9yZXBsYXlzAKpudW1fZXBvY2hzAadvdXRjb21lpGRvbmWnZG9uZV9uc880vE/d7d5twKd2ZXJzaW9uAQ=="
)
SAMPLE_1 = (
    "3gASpHR5cGWmd29ya2VyqXdvcmtlcl9pZKl2MS13b3JrZXKkbmFtZah3b3JrZXItMaVtb2RlbKRkZW1vqnNhbXBsZWRf"
    "bnPPNLxP3eJ8AACpcGVyaW9kX21zy0CPQAAAAAAAq251bV9ydW5uaW5nA6tudW1fd2FpdGluZwCqbnVtX2Jsb2Nrc80E"
    "AK9udW1fZnJlZV9ibG9ja3PNA4SpbnVtX3N0ZXBzKKxzdGVwX21zX21lYW7LQCkAAAAAAACqYnVzeV9zaGFyZcs/4AAA"
    "AAAAAK5wcmVmaWxsX3Rva2VucwytZGVjb2RlX3Rva2VucyKvbnVtX3ByZWVtcHRpb25zAKtxdWV1ZV9kZXB0aACndmVy"
    "c2lvbgE="
)
DONE_US_1 = 3_800_000_000_190_500


async def land(store: Store, kafka: KafkaConfig, payloads: dict[str, bytes]) -> None:
    """Put messages into the outbox as they are, by subject, and wait until all are settled."""
    broker = MemoryBroker()
    for subject, payload in payloads.items():
        broker.outbox.add(subject, payload, subject)
    async with running(MemoryBus(broker), store, kafka) as service:

        async def settled() -> bool:
            return await service.ledger.mark() == len(payloads)

        await eventually(settled, timeout_s=20, poll_s=POLL_S)


async def test_records_of_version_1_land_with_the_defaults_of_what_they_lack(
    store: Store, embedded_kafka: KafkaConfig
) -> None:
    written = {
        "rec.request": b64decode(REQUEST_1),
        "rec.delivery": b64decode(DELIVERY_1),
        "rec.worker": b64decode(SAMPLE_1),
    }
    assert all(b"device" not in payload for payload in written.values())
    await land(store, embedded_kafka, written)
    requests = await store.rows(
        "SELECT request_id, tenant, completion_tokens, cost, toUnixTimestamp64Micro(done_at), "
        "api, stream, max_tokens, deadline_at, called_tools, num_tool_calls, "
        "device_us, device_cost, lives, dispatched_at, trace_id, pulled_tokens, kv_source, pulls, "
        "num_devices, record_version FROM requests FINAL"
    )
    cost = Decimal("0.0000222")
    assert requests == [
        (
            "v1-request",
            "acme",
            34,
            cost,
            DONE_US_1,
            "",
            None,
            None,
            None,
            [],
            0,
            0,
            Decimal(0),
            [],
            None,
            "",
            0,
            "",
            [],
            1,
            1,
        )
    ]
    deliveries = await store.rows(
        "SELECT request_id, gateway, tokens_delivered, model, num_resumes, num_stalls, stalled_ms, "
        "longest_gap_ms, record_version FROM deliveries FINAL"
    )
    assert deliveries == [("v1-request", "g-1", 34, "", 0, 0, 0.0, None, 1)]
    samples = await store.rows(
        "SELECT worker, num_steps, busy_share, busy_us, charged_us, device_name, device_per_hour, "
        "role, pulled_tokens, served_tokens, num_devices, record_version FROM worker_samples FINAL"
    )
    assert samples == [("v1-worker", 40, 0.5, 0, 0, "", Decimal(0), "both", 0, 0, 1, 1)]


async def test_records_of_a_later_version_land_with_what_is_known_of_them(
    store: Store, embedded_kafka: KafkaConfig
) -> None:
    """A later version adds fields, wherever its encoder puts them, and changes none."""
    later = RECORD_VERSION + 7
    records = {
        "rec.request": request_record(1),
        "rec.delivery": delivery_record(1),
        "rec.worker": worker_sample(1),
    }
    written = {}
    for subject, record in records.items():
        fields = msgspec.to_builtins(record)
        known = {name: value for name, value in fields.items() if name != "type"}
        written[subject] = msgspec.msgpack.encode(
            {
                "type": fields["type"],
                "carbon_grams": 1.5,
                **known,
                "version": later,
                "phases": [{"name": "draft", "ms": [1, 2, None]}],
            }
        )
    await land(store, embedded_kafka, written)
    for table, identity in (
        ("requests", request_record(1).request_id),
        ("deliveries", delivery_record(1).request_id),
    ):
        rows = await store.rows(f"SELECT request_id, record_version FROM {table} FINAL")
        assert rows == [(identity, later)]
    assert await store.rows("SELECT prompt_tokens, cost FROM requests FINAL") == [
        (request_record(1).prompt_tokens, request_record(1).cost)
    ]
    assert await store.rows("SELECT worker, record_version FROM worker_samples FINAL") == [
        (worker_sample(1).worker_id, later)
    ]


async def test_a_kind_of_record_that_is_not_known_yet_is_kept_among_the_dead_letters(
    store: Store, embedded_kafka: KafkaConfig
) -> None:
    unknown = msgspec.msgpack.encode({"type": "invoice", "request_id": "r", "version": 9})
    fresh = msgspec.msgpack.encode(request_record(2))
    await land(
        store,
        embedded_kafka,
        {"rec.delivery": unknown, "rec.invoice": unknown, "rec.request": fresh},
    )
    assert await store.rows("SELECT count() FROM requests FINAL") == [(1,)]
    letters = await dead_letters(embedded_kafka, 2)
    assert [letter.value for letter in letters] == [unknown, unknown]
    reasons = {dict(letter.headers)["reason"] for letter in letters}
    assert b"no topic for subject rec.invoice" in reasons
    assert any(b"invoice" in reason and b"type" in reason for reason in reasons)

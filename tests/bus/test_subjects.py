"""Names on the wire: free strings go in and come out as they were."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.bus import redis_keys, subjects
from millrace.bus.job_queue import TenantQueue
from millrace.bus.subjects import ENVELOPE, token, untoken
from millrace.schemas.jobs import Source, Tier
from millrace.schemas.records import (
    DeliveryRecord,
    LossCause,
    LossObserver,
    Record,
    RefusalRecord,
    RequestRecord,
    TranscriptRecord,
    WorkerLossRecord,
    WorkerSample,
)

LEGAL = re.compile(r"[A-Za-z0-9_%-]+")
FREE_TEXT = st.text(st.characters(exclude_categories=()), max_size=40)
LINES = st.builds(
    TenantQueue, FREE_TEXT, st.sampled_from(Tier), st.none(), st.just(False)
) | st.builds(TenantQueue, FREE_TEXT, st.sampled_from(Tier), FREE_TEXT, st.booleans())


@given(FREE_TEXT)
def test_a_token_is_legal_and_reversible(text: str) -> None:
    encoded = token(text)
    assert LEGAL.fullmatch(encoded)
    assert encoded != ENVELOPE
    assert untoken(encoded) == text


@given(FREE_TEXT, FREE_TEXT)
def test_tokens_differ_where_texts_do(one: str, other: str) -> None:
    assert (token(one) == token(other)) == (one == other)
    assert (subjects.worker_entry(one) == subjects.worker_entry(other)) == (one == other)


@given(st.text(max_size=20))
def test_what_is_not_a_token_is_refused(encoded: str) -> None:
    try:
        text = untoken(encoded)
    except ValueError:
        return
    assert token(text) == encoded


@pytest.mark.parametrize("encoded", ["", "a.b", "%zz", "%2e", "a%", "%41", "_", "%FF", "é", "%%"])
def test_known_bad_tokens(encoded: str) -> None:
    with pytest.raises(ValueError, match="token"):
        untoken(encoded)


@given(LINES)
def test_a_job_subject_says_its_line(tenant_queue: TenantQueue) -> None:
    subject = subjects.job(tenant_queue)
    assert subject.count(".") == (2 if tenant_queue.tenant is None else 3 + tenant_queue.reserved)
    assert subjects.tenant_queue_of(subject) == tenant_queue
    assert subjects.stored_tenant_queue_of(subjects.stored_job(subject)) == tenant_queue


@given(LINES, LINES)
def test_each_line_has_a_consumer_of_its_own(one: TenantQueue, other: TenantQueue) -> None:
    assert (subjects.jobs_consumer(one) == subjects.jobs_consumer(other)) == (one == other)
    assert LEGAL.fullmatch(subjects.jobs_consumer(one))
    assert not subjects.is_outdated_consumer(subjects.jobs_consumer(one))


@pytest.mark.parametrize(
    "subject",
    [
        "jobs",
        "jobs.m",
        "jobs.m.gold",
        "jobs.m.free.t.x",
        "jobs.m.free.",
        "jobs.%zz.free",
        "jobs.m.free.%zz",
        "dead.jobs.free",
        "stored.jobs.m.free",
    ],
)
def test_a_subject_of_no_line_is_refused(subject: str) -> None:
    with pytest.raises(ValueError, match=r"subject|token|Tier"):
        subjects.tenant_queue_of(subject)


@given(FREE_TEXT, FREE_TEXT)
def test_a_request_is_told_from_an_envelope(reply: str, request_id: str) -> None:
    subject = subjects.frames(reply, request_id)
    assert subject != subjects.envelope(reply)
    assert subjects.last_token(subject) == request_id


def test_plain_names_are_as_they_were() -> None:
    assert subjects.job(TenantQueue("qwen3-0_6b", Tier.PRO, None)) == "jobs.qwen3-0_6b.pro"
    llama = TenantQueue("meta/Llama 3.1", Tier.FREE, "acme.eu")
    assert subjects.job(llama) == "jobs.meta%2FLlama%203%2E1.free.acme%2Eeu"
    assert subjects.frames("g1", "r1") == "tok.g1.r1"
    assert redis_keys.generation_key("r1") == "gen:r1"


def test_each_record_has_its_subject_topic_and_identity() -> None:
    records: list[Record] = [
        RequestRecord(request_id="a.b", tenant="t"),
        DeliveryRecord(request_id="a.b", gateway_id="g", tenant="t", source=Source.HTTP),
        WorkerSample(worker_id="w", name="w", model="m", sampled_ns=7, period_ms=1.0),
        TranscriptRecord(request_id="a.b", tenant="t", model="m", prompt="p", completion="c"),
        RefusalRecord(
            gateway_id="g",
            number=2,
            recorded_ns=7,
            tenant="t",
            key_id="k",
            door="d",
            status=400,
            code="c",
            count=1,
        ),
        WorkerLossRecord(
            worker_id="w",
            name="w",
            model="m",
            lost_ns=7,
            cause=LossCause.SILENT,
            observer=LossObserver.SCHEDULER,
        ),
    ]
    names = [subjects.record(record) for record in records]
    assert names == [
        *("rec.request", "rec.delivery", "rec.worker", "rec.transcript", "rec.refusal"),
        "rec.worker_loss",
    ]
    assert [subjects.topic(name) for name in names] == list(subjects.RECORD_TOPICS)
    identities = [subjects.record_identity(record) for record in records]
    assert identities == [
        *("request:a%2Eb", "delivery:a%2Eb:g:0", "worker:w:7", "transcript:a%2Eb"),
        *("refusal:g:7:2", "worker_loss:w:scheduler:7"),
    ]

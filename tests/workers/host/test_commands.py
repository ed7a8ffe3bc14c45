"""Commands of schedulers and gateways to a worker."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from millrace.registry.served import ServedModel
from millrace.registry.tokenizers.output_text import TextStream
from millrace.schemas.control import Cancel, CancelReason, Drain, Replay
from millrace.schemas.frames import Cancelled, Delta, Done, FinishReason, Frame, Started
from millrace.schemas.prefix import salt_of
from millrace.schemas.sampling import SamplingParams
from tests.support.waiting import eventually
from tests.workers.scripted import EOS, Bench, bench, line_of

# --- dispatch ---------------------------------------------------------------------------------


async def test_a_full_worker_says_so_and_takes_more_once_one_has_ended(demo: ServedModel) -> None:
    async with bench(demo, max_num_sequences=1, max_num_waiting=1) as b:
        assert (await b.dispatch()).ok
        assert (await b.dispatch(b.job("r2"))).ok
        veto = await b.dispatch(b.job("r3"))
        assert (veto.ok, veto.reason) == (False, "full")
        b.engine.emit("r1:1", [20], FinishReason.LENGTH)
        assert (await b.dispatch(b.job("r4"))).ok
        assert sorted(b.engine.added) == ["r1:1", "r2:1", "r4:1"]


async def test_a_worker_that_cannot_end_requests_fills_up(
    demo: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with bench(demo, max_num_sequences=1, max_num_waiting=0) as b:

        async def never(lease: str) -> None:
            await b.clock.sleep(1e9)

        monkeypatch.setattr(b.bus.jobs, "ack", never)
        for i in range(4):
            assert (await b.dispatch(b.job(f"r{i}"))).ok
            b.engine.emit(f"r{i}:1", [20], FinishReason.LENGTH)
        assert (await b.dispatch(b.job("r5"))).reason == "full"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model": "other"}, "wrong_model"),
        ({"prompt_token_ids": ()}, "bad_request"),
        ({"prompt_token_ids": None, "prompt": "hello"}, "bad_request"),
        ({"sampling": SamplingParams(max_tokens=4)}, "bad_request"),
        ({"sampling": SamplingParams(seed=4)}, "bad_request"),
    ],
)
async def test_vetoes(demo: ServedModel, changes: dict[str, Any], reason: str) -> None:
    async with bench(demo) as b:
        job = msgspec.structs.replace(b.job(), **changes)
        reply = await b.dispatch(job, lease="$ACK.demo.1.1")
        assert (reply.ok, reply.reason) == (False, reason)
        assert not b.engine.added


async def test_a_dispatch_that_is_repeated_starts_nothing(demo: ServedModel) -> None:
    async with bench(demo) as b:
        lease = await b.lease(b.job())
        assert (await b.dispatch(lease=lease, epoch=2)).ok
        b.engine.added.clear()
        assert (await b.dispatch(lease=lease, epoch=2)).ok
        assert (await b.dispatch(lease=lease, epoch=1)).ok
        assert (await b.dispatch(lease="$ACK.demo.9.1", epoch=1)).reason == "stale_epoch"
        assert (await b.dispatch(lease="$ACK.demo.9.1", epoch=2)).reason == "stale_epoch"
        assert not b.engine.added


async def test_a_higher_epoch_is_adopted_without_a_restart(demo: ServedModel) -> None:
    async with bench(demo) as b:
        await b.dispatch()
        b.engine.emit("r1:1", [20, 21])
        await b.settle(1.0)
        b.engine.emit("r1:1", [22])
        await b.settle(7.0)
        b.engine.emit("r1:1", [23])
        assert not await b.peer.jobs.pull(line_of(b.job()), 1, 0.0), "the lease was kept"
        await b.settle(1.0)
        b.frames.clear()
        reply = await b.dispatch(lease="$ACK.demo.2.1", epoch=65, resume_token_ids=(20, 21))
        assert reply.ok
        assert list(b.engine.added) == ["r1:1"]
        assert not b.engine.cancelled
        await eventually(lambda: len(b.of()) == 2)
        started, delta = b.of()
        assert isinstance(started, Started)
        assert started.epoch == 65
        # What the client had not said that it has is sent again.
        assert delta == Delta(
            epoch=65,
            index=2,
            token_ids=(22, 23),
            text=_text(b, [22, 23]),
            text_ends=_ends(b, [22, 23]),
        )
        b.engine.emit("r1:1", [24], FinishReason.LENGTH)
        assert await b.ended() == Done(epoch=65, finish_reason=FinishReason.LENGTH, num_tokens=5)
        assert await b.num_queued() == 0
        (record,) = await b.records()
        assert (record.epoch, record.completion_tokens) == (65, 5)


async def test_a_client_that_follows_another_run_gets_that_one_continued(
    demo: ServedModel,
) -> None:
    async with bench(demo) as b:
        await b.dispatch()
        b.engine.emit("r1:1", [20, 21])
        reply = await b.dispatch(lease="$ACK.demo.2.1", epoch=65, resume_token_ids=(20, 30, 31))
        assert reply.ok
        assert b.engine.cancelled == ["r1:1"]
        assert b.engine.added["r1:65"].output_token_ids == (20, 30, 31)
        b.engine.emit("r1:1", [22])
        b.engine.emit("r1:65", [32], FinishReason.LENGTH)
        assert await b.ended() == Done(epoch=65, finish_reason=FinishReason.LENGTH, num_tokens=4)
        assert b.deltas()[-1].index == 3


async def test_a_finished_request_is_answered_again_not_run_again(demo: ServedModel) -> None:
    """The ack of the answered request got lost, and the job was delivered again."""
    async with bench(demo) as b:
        await b.dispatch()
        b.engine.emit("r1:1", [20, 21], FinishReason.LENGTH)
        await b.ended()
        b.frames.clear()
        b.engine.added.clear()
        reply = await b.dispatch(lease="$ACK.demo.2.1", epoch=65, resume_token_ids=(20,))
        assert reply.ok
        assert await b.ended() == Done(epoch=65, finish_reason=FinishReason.LENGTH, num_tokens=2)
        assert [(delta.index, delta.token_ids) for delta in b.deltas()] == [(1, (21,))]
        assert not b.engine.added
        assert len(await b.records()) == 1


# --- resume -----------------------------------------------------------------------------------


async def test_resuming_goes_on_exactly_behind_what_the_client_has(demo: ServedModel) -> None:
    tokens = demo.tokenizer.encode("naïve café 你好, the END is near", False)
    for cut in range(len(tokens)):
        async with bench(demo) as b:
            await b.dispatch(
                b.job(sampling={"stop": ("END", "the E")}), resume_token_ids=tuple(tokens[:cut])
            )
            had = _resumed_text(b, tokens[:cut])
            for token in tokens[cut:]:
                if b.worker.requests.num_running == 0:
                    break
                b.engine.emit("r1:1", [token])
            done = await b.ended()
            assert isinstance(done, Done)
            assert b.engine.added.get("r1:1") is None or b.engine.added[
                "r1:1"
            ].output_token_ids == tuple(tokens[:cut])
            assert had + b.text() == "naïve café 你好, "
            assert all(delta.index >= cut for delta in b.deltas())
            (record,) = await b.records()
            assert record.completion_tokens == done.num_tokens
            assert record.prompt_tokens == 3


@pytest.mark.parametrize(
    ("resume", "reason"),
    [((20, EOS), FinishReason.STOP), ((20, 21, 22, 23), FinishReason.LENGTH)],
)
async def test_a_resumed_request_that_had_all_its_tokens_just_ends(
    demo: ServedModel, resume: tuple[int, ...], reason: FinishReason
) -> None:
    async with bench(demo) as b:
        await b.dispatch(b.job(sampling={"max_tokens": 4}), epoch=65, resume_token_ids=resume)
        assert await b.ended() == Done(epoch=65, finish_reason=reason, num_tokens=len(resume))
        assert not b.engine.added
        assert not b.deltas()


# --- cancels of older runs --------------------------------------------------------------------


async def test_a_superseded_run_stops_without_a_word(demo: ServedModel) -> None:
    async with bench(demo) as b:
        await b.dispatch(epoch=3)
        b.engine.emit("r1:3", [20])
        await b.settle(1.0)
        b.engine.emit("r1:3", [21])
        same = Cancel(request_id="r1", reason=CancelReason.SUPERSEDED, below_epoch=3)
        await b.peer.control.cancel(same)
        await b.settle()
        assert b.worker.requests.num_running == 1
        await b.peer.control.cancel(msgspec.structs.replace(same, below_epoch=4))
        await b.settle(3.0)
        assert b.engine.cancelled == ["r1:3"]
        assert b.worker.requests.num_running == b.worker.requests.num_ending == 0
        assert not any(isinstance(frame, Done | Cancelled) for frame in b.of())
        assert await b.num_queued() == 1, "the job is the new run's to acknowledge"
        assert not await b.records()
        assert (await b.command(Replay(request_id="r1", from_index=0, reply="x"))).ok is False
        # A dispatch that was overtaken by the news does not start an older run.
        assert (await b.dispatch(epoch=3, lease="$ACK.demo.1.1")).reason == "stale_epoch"
        assert (await b.dispatch(epoch=4, lease="$ACK.demo.2.1")).ok


async def test_a_superseded_ending_does_not_acknowledge(demo: ServedModel) -> None:
    async with bench(demo) as b:
        await b.dispatch()
        b.broker.stop()
        b.engine.emit("r1:1", [20], FinishReason.LENGTH)
        await b.settle(0.1)
        assert b.worker.requests.num_ending == 1
        b.broker.start()
        reply = await b.command(Cancel(request_id="r1", below_epoch=65))
        assert reply.ok
        await b.settle(5.0)
        assert b.worker.requests.num_ending == 0
        assert await b.num_queued() == 1
        assert not await b.records()


# --- replay -----------------------------------------------------------------------------------


async def test_replay_of_a_running_request_moves_the_listener_along(demo: ServedModel) -> None:
    seen: list[Frame] = []
    async with bench(demo) as b:
        await b.peer.frames.subscribe("gw2", lambda _, frame: seen.append(frame))
        await b.dispatch()
        b.engine.emit("r1:1", [20, 21, 22])
        assert (await b.command(Replay(request_id="r1", from_index=1, reply="gw2"))).ok
        await b.settle(1.0)
        b.engine.emit("r1:1", [23], FinishReason.LENGTH)
        await b.ended()
        assert [type(frame).__name__ for frame in seen] == [
            *("Started", "Delta"),
            *("Delta", "Usage", "Done"),
        ]
        assert [frame.index for frame in seen if isinstance(frame, Delta)] == [1, 3]
        assert b.kinds() == ["Started", "Delta", "Delta", "Usage", "Done"]


async def test_a_replay_and_the_next_flush_send_a_token_once(demo: ServedModel) -> None:
    seen: list[Frame] = []
    async with bench(demo, flush_interval_ms=1_000.0) as b:
        await b.peer.frames.subscribe("gw2", lambda _, frame: seen.append(frame))
        await b.dispatch()
        b.engine.emit("r1:1", [20])
        b.engine.emit("r1:1", [21])
        await b.settle(0.1)
        b.engine.emit("r1:1", [22, 23])  # these wait for the next flush
        await b.settle(0.1)
        assert [one for delta in b.deltas() for one in delta.token_ids] == [20, 21]
        assert (await b.command(Replay(request_id="r1", from_index=0, reply="gw2"))).ok
        await b.settle(2.0)
        b.engine.emit("r1:1", [24], FinishReason.LENGTH)
        await b.ended()
        for deltas in (b.deltas(), [frame for frame in seen if isinstance(frame, Delta)]):
            sent = [one for delta in deltas for one in delta.token_ids]
            assert sent == [20, 21, 22, 23, 24]


async def test_replay_of_a_finished_request_until_it_is_forgotten(demo: ServedModel) -> None:
    async with bench(demo, replay_memory_s=60.0) as b:
        await b.dispatch()
        b.engine.emit("r1:1", [20, 21, 22], FinishReason.LENGTH)
        await b.ended()
        b.frames.clear()
        await b.settle(59.0)
        assert (await b.command(Replay(request_id="r1", from_index=2, reply="gw"))).ok
        await eventually(lambda: b.kinds() == ["Started", "Delta", "Usage", "Done"])
        assert b.deltas()[0].index == 2
        await b.settle(2.0)
        gone = await b.command(Replay(request_id="r1", from_index=2, reply="gw"))
        assert gone.reason == "unknown_request"


async def test_a_long_replay_comes_in_pieces(demo: ServedModel) -> None:
    async with bench(demo) as b:
        await b.dispatch(b.job(sampling={"max_tokens": 5000}))
        b.engine.emit("r1:1", [20] * 2500)
        await b.settle(1.0)
        assert [delta.index for delta in b.deltas()] == [0, 1024, 2048]
        assert sum(len(delta.token_ids) for delta in b.deltas()) == 2500


async def test_a_replay_must_make_sense(demo: ServedModel) -> None:
    async with bench(demo) as b:
        await b.dispatch()
        for bad in (Replay(request_id="r1", from_index=-1, reply="x"), _to_nobody()):
            assert (await b.command(bad)).reason == "bad_request"
        assert (await b.command(Cancel(request_id="rx"))).reason == "unknown_request"


# --- drain ------------------------------------------------------------------------------------


async def test_drain_takes_nothing_new_and_finishes_what_runs(demo: ServedModel) -> None:
    async with bench(demo) as b:
        await b.dispatch()
        assert (await b.command(Drain())).ok
        await eventually(lambda: b.statuses[-1].draining)
        assert (await b.dispatch(b.job("r2"))).reason == "draining"
        b.engine.emit("r1:1", [20], FinishReason.LENGTH)
        assert isinstance(await b.ended(), Done)


async def test_stopping_waits_for_what_runs(demo: ServedModel) -> None:
    async with bench(demo) as b:
        await b.dispatch()
        b.stopping.set()
        await b.settle(1.0)
        assert b.statuses[-1].draining
        b.engine.emit("r1:1", [20], FinishReason.LENGTH)
        await b.stop()
        assert b.kinds()[-1] == "Done"
        assert await b.num_queued() == 0
        assert b.statuses[-1].retired


async def test_stopping_gives_back_what_does_not_end_in_time(demo: ServedModel) -> None:
    async with bench(demo, drain_timeout_s=2.0) as b:
        await b.dispatch()
        b.engine.emit("r1:1", [20])
        await b.settle(1.0)
        b.stopping.set()
        b.engine.emit("r1:1", [21])
        b.engine.emit("r1:1", [22])
        await b.stop()
        assert b.kinds()[-1] == "Delta", "no terminal frame: another worker goes on"
        assert [token for delta in b.deltas() for token in delta.token_ids] == [20, 21, 22]
        assert not await b.records()
        (leased,) = await b.peer.jobs.pull(line_of(b.job()), 1, 0.0)
        assert leased.num_deliveries == 2
        assert b.statuses[-1].retired


@pytest.mark.parametrize(
    ("settings", "salts"), [({}, {"one", "two"}), ({"prefix_scope": "shared"}, {""})]
)
async def test_tenants_are_kept_apart_unless_they_share_cached_prefixes(
    demo: ServedModel, settings: dict[str, Any], salts: set[str]
) -> None:
    async with bench(demo, **settings) as b:
        for number, tenant in enumerate(("one", "two")):
            await b.dispatch(b.job(f"r{number}", tenant=tenant))
        assert {request.cache_salt for request in b.engine.added.values()} == salts
        # What the schedulers look a prompt up by is salted in the same way.
        assert b.statuses[-1].prefix_salted is ("" not in salts)


@pytest.mark.parametrize("scope", ["tenant", "shared"])
async def test_a_salt_keeps_prompts_apart_where_schedulers_look_for_them(
    demo: ServedModel, scope: str
) -> None:
    asked = [("one", ""), ("one", "s"), ("one", "z"), ("two", "s")]
    async with bench(demo, prefix_scope=scope) as b:
        jobs = [b.job(f"r{n}", tenant=t, cache_salt=salt) for n, (t, salt) in enumerate(asked)]
        for job in jobs:
            await b.dispatch(job, resume_token_ids=(20,))
        salts = [request.cache_salt for request in b.engine.added.values()]
        assert len(set(salts)) == (4 if scope == "tenant" else 3)
        assert b.statuses[-1].prefix_salted is (scope == "tenant")
    assert salts == [
        salt_of(job.tenant if scope == "tenant" else "", job.cache_salt) for job in jobs
    ]


def _to_nobody() -> Replay:
    return Replay(request_id="r1", from_index=0, reply="")


def _text(b: Bench, token_ids: list[int]) -> str:
    return "".join(_pieces(b, token_ids))


def _ends(b: Bench, token_ids: list[int]) -> tuple[int, ...]:
    ends, end = [], 0
    for piece in _pieces(b, token_ids):
        end += len(piece)
        ends.append(end)
    return tuple(ends)


def _pieces(b: Bench, token_ids: list[int]) -> list[str]:
    return [b.model.tokenizer.decode([token_id]) for token_id in token_ids]


def _resumed_text(b: Bench, token_ids: list[int]) -> str:
    """Return the text that the client got for these tokens from an earlier attempt."""
    sampling = b.job(sampling={"stop": ("END", "the E")}).sampling
    return "".join(TextStream(b.model.tokenizer, sampling, (10, 11, 12)).prime(token_ids))

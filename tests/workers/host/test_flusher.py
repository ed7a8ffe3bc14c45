"""Flushes of frames: their times, and their number of messages."""

from __future__ import annotations

from millrace.engine.types import EngineOutput
from millrace.registry.served import ServedModel
from millrace.schemas.control import Cancel, CancelReason
from millrace.schemas.frames import FinishReason
from tests.support.waiting import eventually
from tests.workers.scripted import bench


def _outputs(ids: list[str], token: int, finish: FinishReason | None = None) -> list[EngineOutput]:
    return [
        EngineOutput(request_id=f"{i}:1", token_ids=(token,), finish_reason=finish) for i in ids
    ]


async def test_the_first_token_goes_at_once_later_ones_gather(demo: ServedModel) -> None:
    async with bench(demo, flush_interval_ms=20.0) as b:
        await b.dispatch()
        b.engine.emit("r1:1", [20])
        await b.settle()
        assert b.kinds() == ["Started", "Delta"]
        b.engine.emit("r1:1", [21])
        await b.settle()
        assert [delta.token_ids for delta in b.deltas()] == [(20,), (21,)], "after a pause: at once"
        for token in (22, 23, 24):
            b.engine.emit("r1:1", [token])
            await b.settle(0.005)
        assert len(b.deltas()) == 2
        await b.settle(0.005)
        assert [delta.token_ids for delta in b.deltas()] == [(20,), (21,), (22, 23, 24)]
        last = b.deltas()[-1]
        assert last.index == 2
        assert last.text_ends[-1] == len(last.text)


async def test_a_terminal_waits_for_nothing(demo: ServedModel) -> None:
    async with bench(demo, flush_interval_ms=20.0) as b:
        await b.dispatch()
        b.engine.emit("r1:1", [20])
        b.engine.emit("r1:1", [21])
        await b.settle()
        b.envelopes.clear()
        b.engine.emit("r1:1", [22])
        b.engine.emit("r1:1", [23], FinishReason.LENGTH)
        await b.settle()
        assert b.kinds()[-3:] == ["Delta", "Usage", "Done"]
        assert b.deltas()[-1].token_ids == (22, 23)
        assert b.envelopes == ["tok.gw._"]


async def test_one_envelope_holds_what_a_step_made_for_one_listener(demo: ServedModel) -> None:
    ids = ["r1", "r2", "r3"]
    async with bench(demo) as b:
        for i in ids:
            await b.dispatch(b.job(i))
        b.engine.step(*_outputs(ids, 20))
        await b.settle(1.0)
        assert b.envelopes == ["tok.gw._"]
        b.engine.step(*_outputs(ids, 21))
        await b.settle(1.0)
        assert b.envelopes == ["tok.gw._"] * 2
        b.engine.step(*_outputs(ids, 22, FinishReason.LENGTH))
        for i in ids:
            await b.ended(i)
        assert b.envelopes == ["tok.gw._"] * 3


async def test_a_listener_that_reads_no_envelopes_gets_single_frames(demo: ServedModel) -> None:
    async with bench(demo) as b:
        await b.dispatch(b.job(batch_frames=False))
        b.engine.emit("r1:1", [20], FinishReason.LENGTH)
        await b.ended()
        assert b.envelopes == ["tok.gw.r1"] * 4


async def test_a_listener_may_have_json(demo: ServedModel) -> None:
    async with bench(demo) as b:
        kinds: list[str | None] = []
        b.broker.subscribe("tok.gw.r1", lambda message: kinds.append(message.content_type))
        await b.dispatch(b.job(batch_frames=False, frames_as_json=True))
        b.engine.emit("r1:1", [20], FinishReason.LENGTH)
        await b.ended()
        assert set(kinds) == {"application/json"}


async def test_frames_that_the_bus_refuses_stop_nobody_else(demo: ServedModel) -> None:
    async with bench(demo) as b:
        b.broker.max_payload_bytes = 1500
        await b.dispatch(b.job(sampling={"max_tokens": 4000}))
        await b.dispatch(b.job("r2"))
        b.engine.emit("r1:1", [20] * 2000)
        b.engine.emit("r2:1", [20], FinishReason.LENGTH)
        await eventually(lambda: b.kinds("r2")[-1:] == ["Done"])


async def test_what_was_posted_for_a_superseded_run_is_not_sent_any_more(
    demo: ServedModel,
) -> None:
    async with bench(demo) as b:
        await b.dispatch()
        await b.dispatch(b.job("r2"))
        b.engine.step(*_outputs(["r1", "r2"], 20))
        # In the same turn of the loop: the tokens are posted, and not with the bus yet.
        b.worker.requests.cancel(
            Cancel(request_id="r1", reason=CancelReason.SUPERSEDED, below_epoch=2)
        )
        await b.settle(1.0)
        assert b.kinds("r1") == []
        assert b.kinds("r2") == ["Started", "Delta"]

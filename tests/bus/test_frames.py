"""Frame streams, on memory and on nats-server alike."""

from __future__ import annotations

import msgspec

from millrace.bus.api import Bus
from millrace.schemas.frames import (
    Accepted,
    Delta,
    Done,
    FinishReason,
    Frame,
    Started,
    TokenLogprob,
    Usage,
)
from tests.bus.conftest import Broker
from tests.support.waiting import eventually

Seen = list[tuple[str, Frame]]

STREAM: list[Frame] = [
    Accepted(),
    Started(worker_id="w 1", epoch=65),
    Delta(
        epoch=65,
        index=0,
        token_ids=(1, 2),
        text="né",
        text_ends=(1, 2),
        logprobs=(TokenLogprob(1, -0.5, ((1, -0.5), (7, -2.0))), TokenLogprob(2, -0.1)),
    ),
    Usage(epoch=65, prompt_tokens=3, completion_tokens=2),
    Done(epoch=65, finish_reason=FinishReason.STOP, num_tokens=2),
]


async def listen(bus: Bus, reply: str) -> Seen:
    seen: Seen = []
    await bus.frames.subscribe(reply, lambda request_id, frame: seen.append((request_id, frame)))
    return seen


class TestFrames:
    async def test_arrive_in_order_as_they_were(self, bus: Bus, broker: Broker) -> None:
        seen = await listen(bus, "gate.1")
        sender = await broker.connect("worker")
        sent = [("r 1/é.*", frame) for frame in STREAM]
        for batch in (False, True):
            for as_json in (False, True):
                seen.clear()
                await sender.frames.publish("gate.1", sent, batch=batch, as_json=as_json)
                await eventually(lambda: len(seen) == len(sent))
                assert seen == sent

    async def test_an_envelope_holds_frames_of_many(self, bus: Bus) -> None:
        seen = await listen(bus, "g")
        sent: Seen = [(f"r{number}", Delta(index=0, token_ids=(number,))) for number in range(50)]
        await bus.frames.publish("g", sent, batch=True)
        await eventually(lambda: len(seen) == 50)
        assert seen == sent

    async def test_only_the_listener_gets_them(self, bus: Bus, broker: Broker) -> None:
        mine = await listen(bus, "a")
        others = await listen(await broker.connect("b"), "a.b")
        await bus.frames.publish("a", [("r", Accepted())])
        await bus.frames.publish("a.b", [("_", Accepted())])
        await eventually(lambda: len(mine) == len(others) == 1)
        assert others[0][0] == "_"

    async def test_all_who_listen_to_a_name_get_all(self, bus: Bus, broker: Broker) -> None:
        both = [await listen(await broker.connect(name), "g") for name in ("old", "new")]
        for batch in (False, True):
            await bus.frames.publish("g", [("r1", STREAM[2]), ("r2", STREAM[0])], batch=batch)
        await eventually(lambda: all(len(seen) == 4 for seen in both))
        assert both[0] == both[1]

    async def test_an_envelope_too_large_is_split(self, bus: Bus) -> None:
        seen = await listen(bus, "g")
        text = "x" * 100_000
        sent: Seen = [
            (f"r{number}", Delta(index=0, token_ids=(1,), text=text)) for number in range(25)
        ]
        await bus.frames.publish("g", sent, batch=True)
        await eventually(lambda: len(seen) == 25)
        assert seen == sent

    async def test_garbage_does_not_end_the_stream(self, bus: Bus, broker: Broker) -> None:
        seen = await listen(bus, "g")
        for subject in ("tok.g.r1", "tok.g._", "tok.g.%zz", "tok.g.a.b"):
            await broker.publish(subject, b"\xc1")
        await broker.publish("tok.g.r1", b"{", {"Content-Type": "application/json"})
        await broker.publish("tok.g.r1", msgspec.msgpack.encode({"type": "delta"}))
        await broker.publish(
            "tok.g.r1", b'{"type":"accepted"}', {"Content-Type": "application/json"}
        )
        await eventually(lambda: seen == [("r1", Accepted())])

    async def test_a_failing_reader_gets_the_next_frame(self, bus: Bus) -> None:
        seen: Seen = []

        def on_frame(request_id: str, frame: Frame) -> None:
            seen.append((request_id, frame))
            raise RuntimeError("a bug in the reader")

        await bus.frames.subscribe("g", on_frame)
        await bus.frames.publish("g", [("r1", Accepted()), ("r2", Accepted())], batch=True)
        await bus.frames.publish("g", [("r3", Accepted())])
        await eventually(lambda: len(seen) == 3)

    async def test_a_closed_subscription_is_silent(self, bus: Bus, broker: Broker) -> None:
        seen: Seen = []
        subscription = await bus.frames.subscribe("g", lambda *pair: seen.append(pair))
        await subscription.close()
        await subscription.close()
        marker = await listen(bus, "g")
        await bus.frames.publish("g", [("r1", Accepted())])
        await eventually(lambda: len(marker) == 1)
        assert seen == []

    async def test_nothing_to_send(self, bus: Bus) -> None:
        await bus.frames.publish("g", [])
        await bus.frames.publish("g", [], batch=True)

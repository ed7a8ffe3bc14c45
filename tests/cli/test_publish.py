"""``millrace publish`` and ``result`` on a real bus, with a scripted worker."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import msgspec
import pytest

from millrace.bus import nats
from millrace.bus.api import Bus
from millrace.bus.nats.permissions import Part
from millrace.cli.main import main
from millrace.cli.requests.answers import StreamPrinter
from millrace.registry.requests.job_bodies import read_body
from millrace.schemas.chat.messages import CalledFunction, MessageToolCall
from millrace.schemas.config import NatsConfig
from millrace.schemas.control import Replay, WorkerCommand, WorkerReply
from millrace.schemas.frames import (
    Accepted,
    Delta,
    Done,
    Failed,
    FinishReason,
    Frame,
    Started,
    Usage,
)
from millrace.schemas.jobs import BeamResult, Job, JobResult
from tests.support.model_queue import pull_one
from tests.support.waiting import eventually


@pytest.fixture
async def bus(nats_config: NatsConfig) -> AsyncIterator[Bus]:
    bus = await nats.connect(nats_config, "test", part=Part.SCHEDULER)
    yield bus
    await bus.close()


async def answer_one(bus: Bus, frames: Sequence[Frame], result: JobResult | None = None) -> Job:
    """Pull the next job, send it these frames, store the result and let go of the job."""
    leased = await pull_one(bus, "demo")
    job = leased.job
    if job.reply:
        await bus.frames.publish(job.reply, [(job.request_id, frame) for frame in frames])
    await bus.results.store(
        result
        or JobResult(
            request_id=job.request_id,
            tenant=job.tenant,
            model=job.model,
            status="done",
            text="Hello 你",
            finish_reason=FinishReason.STOP,
        )
    )
    await bus.jobs.ack(leased.lease)
    return job


async def millrace(*arguments: str, nats_url: str) -> int:
    """The command, as a person runs it, beside the test's own loop."""
    return await asyncio.to_thread(main, [*arguments, "--nats", nats_url, "--timeout", "20"])


async def test_wait_for_the_result(
    bus: Bus, nats_config: NatsConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    code, job = await asyncio.gather(
        millrace("publish", "--prompt", "Hi", "--seed", "7", nats_url=nats_config.url),
        answer_one(bus, ()),
    )
    shown = capsys.readouterr()
    assert code == 0
    assert shown.out == "Hello 你\n"
    assert shown.err == f"{job.request_id}\n"
    request = read_body(job)
    assert request.messages is not None
    assert [(turn.role, turn.content) for turn in request.messages] == [("user", "Hi")]
    assert job.store_result
    assert request.sampling.seed == 7
    assert job.received_ns > 0


async def test_a_body_with_tools(
    bus: Bus, nats_config: NatsConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = {
        "model": "demo",
        "messages": [{"role": "user", "content": "Light!"}],
        "tools": [{"type": "function", "function": {"name": "light"}}],
        "tool_choice": "required",
    }
    # With a byte order mark, as PowerShell writes it.
    (tmp_path / "body.json").write_text(json.dumps(body), encoding="utf-8-sig")
    call = MessageToolCall(id="call_1", function=CalledFunction(name="light", arguments="{}"))
    result = JobResult(
        request_id="", tenant="local", model="demo", status="done", tool_calls=(call,)
    )

    async def answer() -> Job:
        leased = await pull_one(bus, "demo")
        own = msgspec.structs.replace(result, request_id=leased.job.request_id)
        await bus.results.store(own)
        await bus.jobs.ack(leased.lease)
        return leased.job

    file = str(tmp_path / "body.json")
    code, job = await asyncio.gather(
        millrace("publish", "--body", file, "--max-tokens", "9", nats_url=nats_config.url),
        answer(),
    )
    assert code == 0
    assert json.loads(capsys.readouterr().out)[0]["function"]["name"] == "light"
    request = read_body(job)
    assert [tool.name for tool in request.tools] == ["light"]
    assert request.sampling.max_tokens == 9


@pytest.mark.parametrize("text", ["[]", "{", '{"reply": "x"}', '{"model": 3}'])
def test_a_file_without_a_body_is_named(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "body.json"
    file.write_text(text)
    assert main(["publish", "--body", str(file), "--nats", "nats://127.0.0.1:9"]) == 2
    assert str(file) in capsys.readouterr().err


def test_raw_does_not_go_with_a_body(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "body.json"
    file.write_text('{"messages": [{"role": "user", "content": "x"}]}')
    command = ["publish", "--raw", "--body", str(file), "--nats", "nats://127.0.0.1:9"]
    assert main(command) == 2
    assert "--raw does not go with --body" in capsys.readouterr().err


async def test_an_embedding_is_printed_as_numbers(
    bus: Bus, nats_config: NatsConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    values = struct.pack("<3f", 0.5, -2.0, 0.25)
    await bus.results.store(
        JobResult(request_id="e1", tenant="local", model="m", status="done", embedding=values)
    )
    assert await millrace("result", "e1", nats_url=nats_config.url) == 0
    assert capsys.readouterr().out == "[0.5, -2.0, 0.25]\n"


async def test_the_answers_of_a_beam_search_are_printed_as_a_list(
    bus: Bus, nats_config: NatsConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    beams = tuple(
        BeamResult(num_tokens=1, finish_reason=FinishReason.STOP, text=text) for text in ("你", "b")
    )
    await bus.results.store(
        JobResult(request_id="b1", tenant="local", model="m", status="done", beams=beams)
    )
    assert await millrace("result", "b1", nats_url=nats_config.url) == 0
    assert capsys.readouterr().out == '["你", "b"]\n'


async def test_leave_and_come_back(
    bus: Bus, nats_config: NatsConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompt.txt").write_text("Once upon")
    file = str(tmp_path / "prompt.txt")
    options = ("--file", file, "--raw", "--no-wait", "--tenant", "acme", "--tier", "batch")
    assert await millrace("publish", *options, nats_url=nats_config.url) == 0
    request_id = capsys.readouterr().out.strip()
    job = await answer_one(bus, ())
    assert (job.request_id, job.prompt, job.tenant) == (request_id, "Once upon", "acme")
    fetched = await millrace("result", request_id, "--tenant", "acme", nats_url=nats_config.url)
    assert fetched == 0
    assert capsys.readouterr().out == "Hello 你\n"


async def test_stream(
    bus: Bus, nats_config: NatsConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    frames = (
        Accepted(),
        Delta(index=0, token_ids=(1, 2), text="Hello", text_ends=(2, 5)),
        Delta(index=2, token_ids=(3,), text=" 你"),
        Usage(completion_tokens=3),
        Done(finish_reason=FinishReason.STOP, num_tokens=3),
    )
    code, job = await asyncio.gather(
        millrace("publish", "--prompt", "Hi", "--stream", nats_url=nats_config.url),
        answer_one(bus, frames),
    )
    shown = capsys.readouterr()
    assert (code, shown.out, shown.err) == (0, "Hello 你\n", f"{job.request_id}\n")


async def test_frames_lost_by_a_stream_come_from_the_stored_result(
    bus: Bus, nats_config: NatsConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    frames = (
        Delta(index=0, token_ids=(1,), text="He"),
        Delta(index=2, token_ids=(3,), text=" 你"),
    )
    code, _ = await asyncio.gather(
        millrace("publish", "--prompt", "Hi", "--stream", nats_url=nats_config.url),
        answer_one(bus, frames),
    )
    assert (code, capsys.readouterr().out) == (0, "Hello 你\n")


async def test_a_gap_is_filled_by_the_worker_that_runs_it(
    bus: Bus, nats_config: NatsConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[WorkerCommand] = []
    end: tuple[Frame, ...] = (
        Usage(completion_tokens=3),
        Done(finish_reason=FinishReason.STOP, num_tokens=3),
    )

    async def send_again(command: WorkerCommand) -> WorkerReply:
        assert isinstance(command, Replay)
        asked.append(command)
        rest = Delta(index=command.from_index, token_ids=(2, 3), text="llo 你", text_ends=(3, 5))
        frames = [(command.request_id, frame) for frame in (rest, *end)]
        await bus.frames.publish(command.reply, frames)
        return WorkerReply(ok=True)

    async def lose_one() -> Job:
        leased = await pull_one(bus, "demo")
        job = leased.job
        frames = (
            Started(worker_id="w1"),
            Delta(index=0, token_ids=(1,), text="He"),
            Delta(index=2, token_ids=(3,), text=" 你"),
        )
        await bus.frames.publish(job.reply, [(job.request_id, frame) for frame in frames])
        await eventually(lambda: bool(asked))
        result = JobResult(
            request_id=job.request_id,
            tenant=job.tenant,
            model=job.model,
            status="done",
            text="Hello 你",
        )
        await bus.results.store(result)
        await bus.jobs.ack(leased.lease)
        return job

    worker = await bus.control.serve_commands("w1", send_again)
    code, job = await asyncio.gather(
        millrace("publish", "--prompt", "Hi", "--stream", nats_url=nats_config.url), lose_one()
    )
    await worker.close()
    assert (code, capsys.readouterr().out) == (0, "Hello 你\n")
    assert asked[0] == Replay(request_id=job.request_id, from_index=1, reply=job.reply)


async def test_a_failed_request_is_exit_code_1(
    bus: Bus, nats_config: NatsConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    async def fail() -> None:
        leased = await pull_one(bus, "demo")
        failed = JobResult(
            request_id=leased.job.request_id,
            tenant="local",
            model="demo",
            status="failed",
            error_code="model_not_found",
            error_message="There is no such model.",
        )
        await bus.results.store(failed)
        await bus.jobs.ack(leased.lease)

    code, _ = await asyncio.gather(
        millrace("publish", "--prompt", "Hi", nats_url=nats_config.url), fail()
    )
    assert code == 1
    assert "failed: There is no such model. (model_not_found)" in capsys.readouterr().err


async def test_no_result_in_time(
    bus: Bus, nats_config: NatsConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["result", "no-such-id", "--nats", nats_config.url, "--timeout", "0.1"]
    assert await asyncio.to_thread(main, arguments) == 1
    assert "millrace result no-such-id" in capsys.readouterr().err


def test_no_server(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLRACE_NATS__CONNECT_TIMEOUT_S", "0.2")
    assert main(["publish", "--prompt", "x", "--nats", "nats://127.0.0.1:9"]) == 2
    assert capsys.readouterr().err.startswith("millrace publish: ")


def test_a_printer_writes_each_token_once() -> None:
    written: list[str] = []
    printer = StreamPrinter(written.append)
    for frame in (
        Delta(epoch=1, index=0, token_ids=(1, 2), text="ab", text_ends=(1, 2)),
        Delta(epoch=0, index=2, token_ids=(9,), text="old"),
        Delta(epoch=2, index=1, token_ids=(2, 3, 4), text="bcd", text_ends=(1, 2, 3)),
        Delta(epoch=2, index=1, token_ids=(2,), text="b"),
        Failed(epoch=1, code="late", message=""),
    ):
        printer.on_frame("r", frame)
    assert "".join(written) == "abcd"
    assert not printer.gap.is_set()
    printer.on_frame("r", Delta(epoch=2, index=5, token_ids=(6,), text="f"))
    assert printer.gap.is_set()
    assert printer.next_index == 4
    assert printer.resume_point("r").token_ids == (1, 2, 3, 4)
    assert not printer.ended.is_set()
    printer.on_frame("r", Usage(epoch=2, completion_tokens=4))
    printer.on_frame("r", Done(epoch=2, finish_reason=FinishReason.STOP, num_tokens=4))
    assert printer.ended.is_set()
    printer.show_rest("abcde")
    assert "".join(written) == "abcde"


@pytest.mark.parametrize(
    "command", [["publish", "--model", "demo", "--prompt", "x"], ["result", "r"]]
)
def test_a_folder_on_which_nothing_runs_is_said(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "--data", str(tmp_path)]) == 2
    assert "Nothing runs on" in capsys.readouterr().err

"""Fields of frames, declared in ``schemas/frames.py``. These tests name each place that lacks a
field: its maker, the stored result, its reader."""

from __future__ import annotations

import ast
from typing import Any, get_args

import msgspec
import pytest

from millrace.bus.frame_reader import StreamReader
from millrace.bus.stored_results import frames_of
from millrace.scheduler.jobs.terminal_status import TerminalStatus
from millrace.schemas.chat.messages import CalledCustom, MessageToolCall
from millrace.schemas.frames import (
    TERMINAL_FRAMES,
    Beam,
    BeamEnd,
    Cancelled,
    Delta,
    Done,
    Embedding,
    Expired,
    Failed,
    FinishReason,
    Frame,
    PromptLogprobs,
    Queued,
    Shed,
    Started,
    TokenLogprob,
    Usage,
)
from millrace.schemas.jobs import BeamResult, JobResult
from millrace.schemas.notices import Notice, NoticeCode
from millrace.schemas.records import Status
from tests.support.repository import python_files

LOGPROB = TokenLogprob(1, -0.5)
RESULT = JobResult(
    request_id="r",
    tenant="acme",
    model="m",
    status=Status.DONE,
    text="ab",
    token_ids=(1, 2),
    text_ends=(1, 2),
    logprobs=(LOGPROB, LOGPROB),
    prompt_logprobs=(None, LOGPROB),
    embedding=b"\0\0\0\0",
    beams=(
        BeamResult(
            num_tokens=1,
            finish_reason=FinishReason.STOP,
            stop_reason=7,
            cumulative_logprob=-1.0,
            text="x",
            token_ids=(7,),
        ),
    ),
    finish_reason=FinishReason.STOP,
    stop_reason="end",
    usage=Usage(
        prompt_tokens=1,
        cached_tokens=1,
        completion_tokens=2,
        reasoning_tokens=1,
        proposed_tokens=1,
        accepted_tokens=1,
    ),
    notices=(Notice(NoticeCode.TEXT_CUT),),
    reasoning="t",
    reasoning_ends=(1, 1),
    tool_calls=(MessageToolCall(id="c", type="custom", custom=CalledCustom(name="n", input="i")),),
    tool_call_ends=((1,), (1,)),
    error_code="code",
    error_message="message",
    error_param="param",
    done_ns=1,
)
# What a stored answer cannot have, and why.
NOT_KEPT = {
    (Started, "worker_id"): "the answer comes from the store",
    (Started, "num_cached_tokens"): "told by the usage",
    (Delta, "index"): "the whole answer is one piece",
    (PromptLogprobs, "index"): "the whole prompt is one piece",
    (Beam, "beam"): "the number of the first beam is 0",
    (Beam, "index"): "each beam is one piece",
    (Done, "num_prompt_logprobs"): "read from the frame before it",
    (Done, "embedding_bytes"): "read from the frame before it",
}
# What services alone read. A gateway takes the text of a chat apart by itself.
FOR_SERVICES = {
    *("reasoning", "reasoning_ends", "tool_calls", "tool_call_ends", "cumulative_logprob"),
}
# What a job that no worker ran cannot have.
WITHOUT_WORKER = {"num_tokens"}


def unset(struct: msgspec.Struct) -> set[str]:
    """Return the fields of a struct that have their defaults, or nothing."""
    fields = msgspec.structs.fields(struct)
    return {one.name for one in fields if not getattr(struct, one.name) and one.name != "epoch"}


def test_the_sample_has_every_field_of_a_result() -> None:
    assert unset(RESULT) == set()
    assert RESULT.usage is not None
    assert unset(RESULT.usage) == set()
    assert unset(RESULT.beams[0]) == set()


def test_a_stored_result_gives_back_every_field_of_a_frame() -> None:
    lost = {(type(frame), name) for frame in frames_of(RESULT, 1) for name in unset(frame)}
    assert lost == set(NOT_KEPT)
    end = next(frame for frame in frames_of(RESULT, 1) if isinstance(frame, Done))
    assert unset(end.beams[0]) == set()


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (Status.CANCELLED, Cancelled),
        (Status.EXPIRED, Expired),
        (Status.SHED, Shed),
        (Status.FAILED, Failed),
    ],
)
def test_a_job_that_a_scheduler_ends_tells_every_field(status: Status, kind: type) -> None:
    ended = TerminalStatus(
        status=status,
        code="orphaned",
        message="why",
        retryable=True,
        retry_after_s=1.0,
        limit="tokens_per_minute",
        param="prompt",
    )
    frame = ended.frame(1)
    assert type(frame) is kind
    assert unset(ended) == set()
    assert unset(frame) <= WITHOUT_WORKER


def test_a_reader_knows_every_kind_of_frame() -> None:
    frames: dict[type, Any] = {type(frame): frame for frame in frames_of(RESULT)}
    frames |= {Queued: Queued(position=1)}
    for kind in get_args(Frame):
        frame = frames.get(kind) or _least(kind)
        reader = StreamReader()
        reader.feed(frame)
        is_end = kind in TERMINAL_FRAMES and kind is not Done
        assert (reader.terminal is frame) == is_end, f"StreamReader.feed does not know {kind}"


def _least(kind: type[msgspec.Struct]) -> Any:
    """Return a frame of its required fields alone."""
    required = [one for one in msgspec.structs.fields(kind) if one.required]
    return kind(**{one.name: one.type() for one in required})


def test_every_fact_is_made_and_read() -> None:
    """Every field is named where frames are made, and read where they are shown."""
    made: set[str] = set()
    for path in python_files("workers", "scheduler"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.keyword) and node.arg:
                made.add(node.arg)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                made.add(node.value)
    read: set[str] = set()
    for path in python_files("gateway", "bus"):
        if path.name != "stored_results.py":
            tree = ast.walk(ast.parse(path.read_text()))
            read |= {node.attr for node in tree if isinstance(node, ast.Attribute)}
    for kind in (Queued, Started, Delta, Embedding, PromptLogprobs, Beam, BeamEnd, Usage, Done):
        names = set(kind.__struct_fields__) - {"epoch"}
        assert names - made == set(), f"a worker makes no such {kind.__name__}"
        assert names - read - FOR_SERVICES == set(), f"no reader of a {kind.__name__} reads that"

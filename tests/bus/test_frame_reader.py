"""Frame reader: text and token ids come out exactly once for lost, late and repeated frames."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from millrace.bus.frame_reader import Outcome, StreamReader
from millrace.schemas.frames import (
    Beam,
    BeamEnd,
    Cancelled,
    Delta,
    Done,
    Embedding,
    Expired,
    FinishReason,
    Frame,
    PromptLogprobs,
    Queued,
    Started,
    TokenLogprob,
    Usage,
)

_PIECES = st.lists(st.text(max_size=4), min_size=1, max_size=12)


def delta(pieces: list[str], first: int, last: int, epoch: int) -> Delta:
    """Tokens ``first`` to ``last`` (excluded) of a completion with these texts."""
    ends: list[int] = []
    for piece in pieces[first:last]:
        ends.append((ends[-1] if ends else 0) + len(piece))
    return Delta(
        index=first,
        token_ids=tuple(range(100 + first, 100 + last)),
        text="".join(pieces[first:last]),
        text_ends=tuple(ends) if last - first > 1 else (),
        epoch=epoch,
    )


def the_end(pieces: list[str], epoch: int) -> list[Frame]:
    return [
        Usage(completion_tokens=len(pieces), epoch=epoch),
        Done(finish_reason=FinishReason.STOP, num_tokens=len(pieces), epoch=epoch),
    ]


def replay(pieces: list[str], from_index: int, epoch: int) -> list[Frame]:
    """Return a worker's replay: all frames from a token on."""
    frames: list[Frame] = [Started(worker_id=f"w{epoch}", epoch=epoch)]
    if from_index < len(pieces):
        frames.append(delta(pieces, from_index, len(pieces), epoch))
    return frames + the_end(pieces, epoch)


@st.composite
def damaged_streams(draw: st.DrawFn) -> tuple[list[str], list[Frame]]:
    """A completion, and its frames from several epochs: cut anyhow, some lost, some twice, older
    epochs between newer ones."""
    pieces = draw(_PIECES)
    num_epochs = draw(st.integers(1, 3))
    runs: list[list[Frame]] = []
    for epoch in range(num_epochs):
        start = draw(st.integers(0, len(pieces)))
        stop = draw(st.integers(start, len(pieces)))
        run: list[Frame] = [Started(worker_id=f"w{epoch}", epoch=epoch)]
        index = start
        while index < stop:
            last = draw(st.integers(index + 1, stop))
            # A frame may begin with tokens that were sent before.
            run.append(delta(pieces, draw(st.integers(0, index)), last, epoch))
            index = last
        if stop == len(pieces):
            run += the_end(pieces, epoch)
        runs.append([frame for frame in run if draw(st.integers(0, 4)) > 0])
    frames: list[Frame] = []
    while any(runs):
        run = draw(st.sampled_from([run for run in runs if run]))
        frames.append(run.pop(0))
        if draw(st.integers(0, 4)) == 0:
            frames.append(draw(st.sampled_from(frames)))
    return pieces, frames


@given(stream=damaged_streams(), take_often=st.booleans())
def test_text_and_ids_come_exactly_once(
    stream: tuple[list[str], list[Frame]], take_often: bool
) -> None:
    pieces, frames = stream
    reader = StreamReader()
    taken: list[str] = []
    next_index = 0

    def take() -> None:
        nonlocal next_index
        progress = reader.take()
        assert progress.first_index == next_index
        next_index += progress.num_tokens
        taken.append(progress.text)
        assert "".join(taken) == "".join(pieces[:next_index])

    for frame in frames:
        outcome = reader.feed(frame)
        assert reader.token_ids == list(range(100, 100 + reader.next_index))
        if outcome is Outcome.GAP:
            assert reader.terminal is None
        if take_often:
            take()
    for frame in replay(pieces, reader.next_index, reader.epoch):
        reader.feed(frame)
    take()
    assert isinstance(reader.terminal, Done)
    assert reader.usage is not None
    assert "".join(taken) == "".join(pieces)
    assert reader.token_ids == list(range(100, 100 + len(pieces)))
    assert reader.pending_bytes == 0


def test_an_older_epoch_is_not_heard() -> None:
    reader = StreamReader()
    reader.feed(Started(worker_id="new", epoch=2))
    assert reader.feed(delta(["a"], 0, 1, epoch=1)) is Outcome.NOTHING
    assert reader.feed(Cancelled(epoch=1)) is Outcome.NOTHING
    assert reader.next_index == 0


def test_an_end_waits_for_its_tokens_and_usage() -> None:
    reader = StreamReader()
    reader.feed(delta(["a", "b"], 0, 1, epoch=0))
    usage, done = the_end(["a", "b"], 0)
    assert reader.feed(done) is Outcome.GAP
    assert reader.waits_for_missing
    assert reader.feed(delta(["a", "b"], 1, 2, epoch=0)) is Outcome.TOKENS
    assert reader.feed(usage) is Outcome.END
    assert reader.take().text == "ab"


def test_an_end_of_a_dead_worker_does_not_hold_back_its_successor() -> None:
    reader = StreamReader()
    reader.feed(Done(finish_reason=FinishReason.STOP, num_tokens=5, epoch=0))
    reader.feed(Started(worker_id="second", epoch=1))
    assert not reader.waits_for_missing
    for frame in replay(["a", "b"], 0, 1):
        reader.feed(frame)
    assert isinstance(reader.terminal, Done)
    assert reader.take().text == "ab"


def test_an_overlap_is_cut_by_the_ends_of_the_tokens_texts() -> None:
    pieces = ["wor", "", "ld", "ö"]
    reader = StreamReader()
    reader.feed(delta(pieces, 0, 2, epoch=0))
    assert reader.feed(delta(pieces, 1, 4, epoch=0)) is Outcome.TOKENS
    assert reader.take().text == "worldö"


def test_an_overlap_without_ends_is_asked_for_again() -> None:
    reader = StreamReader()
    reader.feed(delta(["a", "b"], 0, 1, epoch=0))
    blind = Delta(index=0, token_ids=(100, 101), text="ab")
    assert reader.feed(blind) is Outcome.GAP
    assert reader.take().text == "a"


def test_other_ends_do_not_wait() -> None:
    reader = StreamReader()
    reader.feed(delta(["a"], 0, 1, epoch=0))
    assert reader.feed(Expired(num_tokens=7)) is Outcome.END
    assert reader.feed(delta(["a", "b"], 1, 2, epoch=0)) is Outcome.NOTHING


def test_news_of_the_queue_end_with_the_start() -> None:
    reader = StreamReader()
    assert reader.feed(Queued(position=3)) is Outcome.NOTE
    assert reader.feed(Queued(position=3)) is Outcome.NOTHING
    assert reader.feed(Started(worker_id="w")) is Outcome.NOTE
    assert reader.feed(Queued(position=1)) is Outcome.NOTHING


def test_prompt_logprobs_come_in_pieces_and_the_end_waits_for_them() -> None:
    whole = (None, *(TokenLogprob(number, -0.5) for number in range(1, 5)))
    reader = StreamReader()
    reader.feed(PromptLogprobs(logprobs=whole[:2]))
    assert reader.feed(PromptLogprobs(index=3, logprobs=whole[3:])) is Outcome.GAP
    reader.feed(delta(["a"], 0, 1, epoch=0))
    usage, done = the_end(["a"], 0)
    reader.feed(usage)
    assert reader.feed(msgspec.structs.replace(done, num_prompt_logprobs=5)) is Outcome.GAP
    # A replay repeats logprobs that the reader has.
    assert reader.feed(PromptLogprobs(logprobs=whole[:3])) is Outcome.GAP
    assert reader.feed(PromptLogprobs(index=1, logprobs=whole[1:])) is Outcome.END
    assert reader.prompt_logprobs == whole


def test_an_end_waits_for_the_embedding() -> None:
    reader = StreamReader()
    reader.feed(Usage(prompt_tokens=3))
    done = Done(finish_reason=FinishReason.STOP, num_tokens=0, embedding_bytes=8)
    assert reader.feed(done) is Outcome.GAP
    assert reader.feed(Embedding(values=b"\0" * 8)) is Outcome.END
    assert reader.embedding == b"\0" * 8


def beam_frames(texts: list[str], epoch: int) -> list[Frame]:
    """Return a worker's frames of a beam search with these answers, two tokens per frame."""
    frames: list[Frame] = [Started(worker_id="w", epoch=epoch)]
    for beam, text in enumerate(texts):
        for index in range(0, len(text), 2):
            part = text[index : index + 2]
            ids = tuple(map(ord, part))
            frames.append(Beam(beam=beam, index=index, token_ids=ids, text=part, epoch=epoch))
    ends = tuple(BeamEnd(num_tokens=len(text), finish_reason=FinishReason.STOP) for text in texts)
    frames.append(Usage(completion_tokens=sum(map(len, texts)), epoch=epoch))
    frames.append(Done(finish_reason=FinishReason.STOP, num_tokens=0, beams=ends, epoch=epoch))
    return frames


@given(
    former=st.lists(st.text(min_size=1, max_size=5), min_size=1, max_size=3),
    texts=st.lists(st.text(min_size=1, max_size=5), min_size=1, max_size=3),
    num_former=st.integers(0, 8),
    data=st.data(),
)
def test_beams_are_those_of_the_last_attempt_whatever_happens_to_frames(
    former: list[str], texts: list[str], num_former: int, data: st.DataObject
) -> None:
    reader = StreamReader()
    # All of the first but its end may have come.
    for frame in beam_frames(former, 0)[:-1][:num_former]:
        reader.feed(frame)
    sent = beam_frames(texts, 1)
    for frame in data.draw(st.lists(st.sampled_from(sent), max_size=20)):
        reader.feed(frame)
    for frame in beam_frames(former, 0):  # an attempt that was given up lives
        assert reader.epoch == 0 or reader.feed(frame) is Outcome.NOTHING
    for frame in sent:
        reader.feed(frame)
    assert [beam.text for beam in reader.beams] == texts
    assert [beam.token_ids for beam in reader.beams] == [list(map(ord, text)) for text in texts]
    assert isinstance(reader.terminal, Done)
    assert reader.next_index == 0

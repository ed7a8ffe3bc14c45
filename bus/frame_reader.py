"""Reader of a stream: yields each token once from frames that may repeat, overlap or be missing.

Pure: no clock, no bus, no socket. ``schemas.frames`` has the rules.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import NamedTuple

from millrace.schemas.frames import (
    Accepted,
    Beam,
    Delta,
    Done,
    Embedding,
    Frame,
    PromptLogprobs,
    Queued,
    Started,
    TerminalFrame,
    TokenLogprob,
    Usage,
)


class Outcome(Enum):
    """Effect of a frame on the reader."""

    NOTHING = auto()
    NOTE = auto()
    TOKENS = auto()
    GAP = auto()
    END = auto()


class Progress(NamedTuple):
    """Tokens gathered since the last ``take``, from ``first_index`` on.

    They have log-probabilities if the job asked for them.
    """

    first_index: int
    num_tokens: int
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


class BeamText:
    """Text and tokens read of one answer of a beam search."""

    __slots__ = ("text", "token_ids")

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.text = ""


class StreamReader:
    """Reader that splices the frames of one request and gathers text for its client.

    Invariants: ``token_ids`` is the read prefix of the completion, without gaps. The text returned
    by ``take`` plus the pending text is exactly the text of those tokens. ``terminal`` is set once,
    and nothing changes after it. A ``Done`` is held back until all tokens that it counts and the
    usage are there. Until then each further frame of the end is a gap.

    ``beams`` are the answers of a beam search, in place of tokens. They belong to one epoch, as
    another worker searches anew.

    With ``first_wanted_index`` the client already has the tokens before it. They are read like the
    others, but their text goes to ``text_before``, and ``take`` does not return it.
    """

    __slots__ = (
        "_first_wanted_index",
        "_held_end",
        "_logprobs",
        "_taken",
        "_texts",
        "_texts_before",
        "beams",
        "counted_epoch",
        "embedding",
        "epoch",
        "num_epochs",
        "pending_bytes",
        "prompt_logprobs",
        "queued",
        "started",
        "terminal",
        "token_ids",
        "usage",
    )

    def __init__(self, first_wanted_index: int = 0) -> None:
        self.epoch = 0
        self.num_epochs = 0
        self.counted_epoch = -1
        self.token_ids: list[int] = []
        self.queued: Queued | None = None
        self.started: Started | None = None
        self.usage: Usage | None = None
        self.terminal: TerminalFrame | None = None
        self.pending_bytes = 0
        self.prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
        self.embedding = b""
        self.beams: list[BeamText] = []
        self._texts: list[str] = []
        self._texts_before: list[str] = []
        self._logprobs: list[TokenLogprob] = []
        self._first_wanted_index = first_wanted_index
        self._taken = first_wanted_index
        self._held_end: Done | None = None

    @property
    def next_index(self) -> int:
        """Index of the first missing token."""
        return len(self.token_ids)

    def count_epochs_on(self, num_epochs: int, last_epoch: int) -> None:
        """Continue another reader's count of runs: ``num_epochs`` up to ``last_epoch``."""
        self.num_epochs = num_epochs
        self.counted_epoch = last_epoch

    @property
    def has_pending(self) -> bool:
        return len(self.token_ids) > self._taken

    @property
    def waits_for_missing(self) -> bool:
        """True if the end is known and something before it is missing."""
        return self._held_end is not None and self.terminal is None

    @property
    def text_before(self) -> str:
        """Text that was read of the tokens before the first wanted one."""
        return "".join(self._texts_before)

    def take(self) -> Progress:
        """Return what was gathered since the last call."""
        index = self._taken
        self._taken = max(index, len(self.token_ids))
        text = self._texts[0] if len(self._texts) == 1 else "".join(self._texts)
        self._texts.clear()
        self.pending_bytes = 0
        if not self._logprobs:
            return Progress(index, self._taken - index, text)
        logprobs, self._logprobs = tuple(self._logprobs), []
        return Progress(index, self._taken - index, text, logprobs)

    def feed(self, frame: Frame) -> Outcome:
        """Read a frame. GAP: frames from ``next_index`` on must be sent again."""
        if self.terminal is not None or frame.epoch < self.epoch:
            return Outcome.NOTHING
        if frame.epoch > self.epoch:
            self._enter_epoch(frame.epoch)
        if type(frame) is Delta:
            return self._feed_delta(frame)
        if isinstance(frame, Accepted):
            return Outcome.NOTHING
        if isinstance(frame, Queued):
            return self._feed_queued(frame)
        if isinstance(frame, Started):
            return self._feed_started(frame)
        if isinstance(frame, Usage):
            self.usage = frame
            return self._end_if_complete() if self._held_end is not None else Outcome.NOTHING
        if isinstance(frame, Done):
            self._held_end = frame
            return self._end_if_complete()
        if isinstance(frame, PromptLogprobs):
            return self._feed_prompt_logprobs(frame)
        if isinstance(frame, Embedding):
            self.embedding = frame.values
            return self._end_if_complete() if self._held_end is not None else Outcome.NOTHING
        if isinstance(frame, Beam):
            return self._feed_beam(frame)
        assert not isinstance(frame, Delta)
        self.terminal = frame
        return Outcome.END

    def end(self, frame: TerminalFrame) -> None:
        """End the stream from this side (timeout, disconnect). Later frames are ignored."""
        if self.terminal is None:
            self.terminal = frame

    def _enter_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self.usage = None
        self.beams = []
        self._held_end = None

    def _feed_queued(self, frame: Queued) -> Outcome:
        if self.started is not None or frame == self.queued:
            return Outcome.NOTHING
        self.queued = frame
        return Outcome.NOTE

    def _feed_started(self, frame: Started) -> Outcome:
        if frame == self.started:
            return Outcome.NOTHING
        self.started = frame
        if frame.epoch > self.counted_epoch:
            self.counted_epoch = frame.epoch
            self.num_epochs += 1
        return Outcome.NOTE

    def _feed_prompt_logprobs(self, frame: PromptLogprobs) -> Outcome:
        num_known = len(self.prompt_logprobs) - frame.index
        if num_known < 0:
            return Outcome.GAP
        self.prompt_logprobs += frame.logprobs[num_known:]
        return self._end_if_complete() if self._held_end is not None else Outcome.NOTHING

    def _feed_beam(self, frame: Beam) -> Outcome:
        if frame.beam == len(self.beams):
            self.beams.append(BeamText())
        elif frame.beam > len(self.beams):
            return Outcome.GAP
        beam = self.beams[frame.beam]
        num_known = len(beam.token_ids)
        if num_known < frame.index:
            return Outcome.GAP
        if num_known == frame.index:  # a replay cuts beams at the same places
            beam.token_ids.extend(frame.token_ids)
            beam.text += frame.text
        return self._end_if_complete() if self._held_end is not None else Outcome.NOTHING

    def _feed_delta(self, frame: Delta) -> Outcome:
        num_known = len(self.token_ids) - frame.index
        if num_known < 0:
            return Outcome.GAP
        num_tokens = len(frame.token_ids)
        if num_known >= num_tokens:
            return Outcome.NOTHING
        if (num_known or frame.index < self._first_wanted_index) and (
            len(frame.text_ends) != num_tokens and num_tokens > 1
        ):
            return Outcome.GAP
        text = frame.text
        if num_known == 0:
            self.token_ids.extend(frame.token_ids)
        else:
            self.token_ids.extend(frame.token_ids[num_known:])
            text = text[frame.text_ends[num_known - 1] :]
        if frame.logprobs:
            self._keep_logprobs(frame)
        if frame.index < self._first_wanted_index:
            text = self._cut_before(frame, num_known, text)
        if text:
            self._texts.append(text)
            self.pending_bytes += len(text) if text.isascii() else len(text.encode())
        if self._held_end is None:
            return Outcome.TOKENS
        outcome = self._end_if_complete()
        return Outcome.TOKENS if outcome is Outcome.GAP else outcome

    def _keep_logprobs(self, frame: Delta) -> None:
        """Keep the log-probabilities of new, wanted tokens.

        A resumed run has none of the first tokens.
        """
        first_index = frame.index + len(frame.token_ids) - len(frame.logprobs)
        wanted = max(self._taken + len(self._logprobs), self._first_wanted_index)
        self._logprobs.extend(frame.logprobs[max(0, wanted - first_index) :])

    def _cut_before(self, frame: Delta, num_known: int, text: str) -> str:
        """Set aside the text of tokens that the client has; return the rest of ``text``.

        ``text`` begins ``num_known`` tokens into the frame.
        """
        num_had = min(self._first_wanted_index - frame.index, len(frame.token_ids))
        if num_had <= num_known:
            return text
        if len(frame.token_ids) == 1:
            end = len(text)
        else:
            end = frame.text_ends[num_had - 1] - (
                frame.text_ends[num_known - 1] if num_known else 0
            )
        self._texts_before.append(text[:end])
        return text[end:]

    def _end_if_complete(self) -> Outcome:
        end = self._held_end
        assert end is not None
        if (
            len(self.token_ids) < end.num_tokens
            or self.usage is None
            or len(self.prompt_logprobs) < end.num_prompt_logprobs
            or len(self.embedding) < end.embedding_bytes
            or [len(beam.token_ids) for beam in self.beams] != [b.num_tokens for b in end.beams]
        ):
            return Outcome.GAP
        self.terminal = end
        return Outcome.END

"""Answers of a beam search, which the engine returns at its end."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from millrace.engine.types import EngineOutput
from millrace.registry.reasoning import num_reasoning_tokens
from millrace.registry.tokenizers.output_text import TextStream
from millrace.registry.tokenizers.tokenizer import Tokenizer
from millrace.schemas.frames import Beam, BeamEnd
from millrace.schemas.jobs import BeamResult, Job
from millrace.schemas.records import Status
from millrace.workers.host.generations.state import GenerationOutcome

MAX_TOKENS_PER_BEAM_FRAME = 1024


class _Answer(msgspec.Struct, frozen=True):
    """Answer of one beam; ``pieces[i]`` is the text that ``token_ids[i]`` added."""

    token_ids: tuple[int, ...]
    pieces: list[str]
    end: BeamEnd


class BeamAnswers:
    """Collector of the ``sampling.n`` answers of a job, best first.

    Answers are unavailable until ``add`` has returned an outcome. If an engine dies before it has
    returned all answers, the next engine returns all of them again.
    """

    def __init__(self, tokenizer: Tokenizer, job: Job) -> None:
        self._tokenizer = tokenizer
        self._job = job
        self._answers: list[_Answer] = []
        self._is_complete = False

    @classmethod
    def of(cls, job: Job, tokenizer: Tokenizer) -> BeamAnswers | None:
        """Return a collector for a job with a beam search; None for another job."""
        return cls(tokenizer, job) if job.sampling.use_beam_search else None

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all answers; 0 until all are there."""
        return sum(end.num_tokens for end in self.ends)

    @property
    def num_reasoning_tokens(self) -> int:
        """Number of reasoning tokens of all answers."""
        reasoning = self._job.sampling.reasoning
        if reasoning is None or not self._is_complete:
            return 0
        return sum(num_reasoning_tokens(reasoning, answer.pieces) for answer in self._answers)

    @property
    def text(self) -> str:
        """Text of the best answer."""
        return "".join(self._answers[0].pieces) if self._is_complete else ""

    @property
    def ends(self) -> tuple[BeamEnd, ...]:
        return tuple(answer.end for answer in self._answers) if self._is_complete else ()

    def add(self, output: EngineOutput) -> GenerationOutcome | None:
        """Add the next answer. With the last one, return the outcome, which is the best
        answer's.
        """
        if output.choice == 0:
            self._answers.clear()
        sampling = self._job.sampling
        stream = TextStream(self._tokenizer, sampling, self._job.prompt_token_ids or ())
        pieces = stream.prime(output.token_ids)
        pieces[-1] += stream.flush()
        last = output.token_ids[-1]
        assert output.finish_reason is not None
        end = BeamEnd(
            num_tokens=len(output.token_ids),
            finish_reason=output.finish_reason,
            stop_reason=last if last in sampling.stop_token_ids else None,
            cumulative_logprob=output.cumulative_logprob,
        )
        self._answers.append(_Answer(output.token_ids, pieces, end))
        if len(self._answers) < sampling.n:
            return None
        self._is_complete = True
        return GenerationOutcome(
            status=Status.DONE, finish_reason=self._answers[0].end.finish_reason
        )

    def frames(self, epoch: int) -> Iterator[Beam]:
        """Yield all answers in frames of bounded size."""
        if not self._is_complete:
            return
        for number, answer in enumerate(self._answers):
            for start in range(0, len(answer.token_ids), MAX_TOKENS_PER_BEAM_FRAME):
                part = slice(start, start + MAX_TOKENS_PER_BEAM_FRAME)
                yield Beam(
                    epoch=epoch,
                    beam=number,
                    index=start,
                    token_ids=answer.token_ids[part],
                    text="".join(answer.pieces[part]),
                )

    def results(self) -> tuple[BeamResult, ...]:
        """Return the answers as an asynchronous caller gets them."""
        if not self._is_complete:
            return ()
        return tuple(
            BeamResult(
                **msgspec.structs.asdict(answer.end),
                text="".join(answer.pieces),
                token_ids=answer.token_ids,
            )
            for answer in self._answers
        )

"""Output of a generation: tokens, their text, log-probabilities, an embedding."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from millrace.engine.types import EngineOutput
from millrace.registry.tokenizers.output_text import TextStream
from millrace.schemas.frames import TokenLogprob
from millrace.workers.host.generations.beam_answers import BeamAnswers
from millrace.workers.host.generations.chat_answer import ChatAnswer


class GeneratedOutput:
    """Tokens and text of one generation.

    ``token_ids`` and ``pieces`` run in parallel: ``pieces[i]`` is the text that token i added. The
    client has the first ``num_resumed`` tokens from an earlier attempt. ``logprobs`` has an entry
    for each token from ``num_resumed`` on, if the job asked for any. ``prompt_logprobs`` has an
    entry for each token of the prompt. ``embedding`` is little-endian float32, empty until it is
    computed. ``beams`` are the answers of a beam search, which has no other tokens; None without
    one. ``answer`` splits a chat's answer into its parts; None if the text is sent as the model
    wrote it.
    """

    __slots__ = (
        "answer",
        "beams",
        "embedding",
        "logprobs",
        "num_resumed",
        "pieces",
        "prompt_logprobs",
        "stream",
        "token_ids",
    )

    def __init__(
        self,
        resume_token_ids: Sequence[int],
        stream: TextStream,
        beams: BeamAnswers | None = None,
        answer: ChatAnswer | None = None,
    ) -> None:
        self.stream = stream
        self.token_ids = list(resume_token_ids)
        self.pieces = stream.prime(resume_token_ids)
        self.num_resumed = len(self.token_ids)
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
        self.embedding = b""
        self.beams = beams
        self.answer = answer

    @property
    def num_completion_tokens(self) -> int:
        """Number of all tokens produced, by earlier attempts too."""
        return len(self.token_ids) if self.beams is None else self.beams.num_tokens

    @property
    def text(self) -> str:
        """Text of the answer; for a beam search, of its best answer."""
        return "".join(self.pieces) if self.beams is None else self.beams.text

    def add_tokens(self, output: EngineOutput) -> bool:
        """Add the tokens of a step. Return whether a stop string or the only allowed call is
        complete.
        """
        if output.logprobs:
            self.logprobs.extend(output.logprobs)
        push, token_ids, pieces = self.stream.push, self.token_ids, self.pieces
        for token_id in output.token_ids:
            text, stopped = push(token_id)
            token_ids.append(token_id)
            pieces.append(text)
            if stopped:
                del self.logprobs[len(token_ids) - self.num_resumed :]
                return True
        return False

    def add_scores(self, output: EngineOutput) -> None:
        """Add the results for the prompt: log-probabilities, or an embedding."""
        if output.prompt_logprobs:
            self.prompt_logprobs = output.prompt_logprobs
        if output.embedding:
            self.embedding = struct.pack(f"<{len(output.embedding)}f", *output.embedding)

    def flush(self) -> None:
        """Add the text that was held back after the last token."""
        if self.pieces:
            self.pieces[-1] += self.stream.flush()

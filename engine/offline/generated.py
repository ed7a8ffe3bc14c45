"""Request of an offline batch, and its answer as it grows."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from millrace.engine.offline.chat import NO_CHAT, OfflineChat
from millrace.engine.types import EngineOutput, EngineRequest
from millrace.registry.served import ServedModel
from millrace.registry.tokenizers.output_text import TextStream
from millrace.registry.tokenizers.tokenizer import Tokenizer
from millrace.schemas.frames import FinishReason, TokenLogprob
from millrace.schemas.jobs import Job
from millrace.schemas.models.adapters import AdapterRef
from millrace.schemas.prefix import salt_of
from millrace.schemas.sampling import SamplingOptions, SamplingParams
from millrace.schemas.tools import ToolDefinition, ToolFormat


class OfflineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Prepared job, and fields that only the engine reads.

    Attributes:
        id: The caller's name of the request.
        cancel_after_tokens: The request is cancelled after this many tokens of all its choices. 0:
            after the first step that could have run it.
        tool_format: Format of the model's calls of ``tools``. None: the request has no tools.
        freeform: Names of tools whose input is text.
    """

    id: str | int
    job: Job
    priority: int = 0
    cache_salt: str = ""
    cancel_after_tokens: int | None = None
    adapter: AdapterRef | None = None
    tool_format: ToolFormat | None = None
    tools: tuple[ToolDefinition, ...] = ()
    freeform: tuple[str, ...] = ()

    def engine_request(self, eos_token_ids: Sequence[int]) -> EngineRequest:
        job = self.job
        assert job.prompt_token_ids is not None
        return EngineRequest(
            request_id=job.request_id,
            prompt_token_ids=job.prompt_token_ids,
            sampling=SamplingParams.of(job.sampling),
            eos_token_ids=tuple(eos_token_ids),
            priority=self.priority,
            cache_salt=self._salt,
            pooling=job.pooling,
            adapter=self.adapter,
        )

    @property
    def _salt(self) -> str:
        """Salt of the prefix cache. Blocks of an adapter are not shared with others."""
        if self.adapter is None:
            return self.cache_salt
        return salt_of("", self.cache_salt, self.adapter.version)


def generation_job(
    served: ServedModel,
    seed_source: random.Random,
    *,
    request_id: str,
    sampling: SamplingOptions,
    chat: OfflineChat = NO_CHAT,
    **fields: Any,
) -> Job:
    """Prepare a job that continues a conversation, or the prompt among ``fields``.

    Its grammar is that of its tool calls. Raises ValueError, ParameterError or ContextLengthError.
    """
    grammar = chat.grammar(served.tool_format, sampling.grammar)
    job = Job(
        request_id=request_id,
        model=served.entry.name,
        messages=chat.messages,
        tools=chat.tools,
        sampling=msgspec.structs.replace(sampling, grammar=grammar),
        **fields,
    )
    return served.prepare(job, seed_source, in_frames=False)


@dataclass
class OfflineCompletion:
    """Completion of a request. Times are monotonic seconds."""

    stream: TextStream
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    first_token_s: float = 0.0
    last_token_s: float = 0.0
    finish_reason: FinishReason | None = None
    cumulative_logprob: float = 0.0
    error: tuple[str, str] | None = None

    @property
    def ended(self) -> bool:
        return self.finish_reason is not None or self.error is not None

    def add_output(self, output: EngineOutput, now_s: float, limit: int | None) -> None:
        """Add the tokens of a step, at most ``limit`` of them and none after a stop string."""
        for at, token_id in enumerate(output.token_ids[:limit]):
            text, stopped = self.stream.push(token_id)
            self.text.append(text)
            self.token_ids.append(token_id)
            self.logprobs += output.logprobs[at : at + 1]
            self.last_token_s = now_s
            if len(self.token_ids) == 1:
                self.first_token_s = now_s
            if stopped:
                self.finish_reason = FinishReason.STOP
                return
        self.error = output.error
        self.cumulative_logprob = output.cumulative_logprob
        if limit is None or len(output.token_ids) <= limit:
            self.finish_reason = output.finish_reason
        if self.ended:
            self.text.append(self.stream.flush())


class Generated:
    """Answer to a request as it grows: ``SamplingParams.n`` choices, or an ``embedding``.

    ``cancelled`` is True if the request was cancelled before all choices had ended.
    ``OfflineBatch`` cancels it in the engine.
    """

    def __init__(self, request: OfflineRequest, tokenizer: Tokenizer, added_s: float) -> None:
        job = request.job
        self.request = request
        self.added_s = added_s
        self.cancelled = False
        self.num_cached_tokens = 0
        self.prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
        self.embedding: tuple[float, ...] = ()
        self.choices = [
            OfflineCompletion(TextStream(tokenizer, job.sampling, job.prompt_token_ids or ()))
            for _ in range(job.sampling.n)
        ]
        self._num_in_engine = len(self.choices)
        self._started = False

    @property
    def num_tokens(self) -> int:
        return sum(len(choice.token_ids) for choice in self.choices)

    @property
    def ended(self) -> bool:
        return self.cancelled or all(choice.ended for choice in self.choices)

    @property
    def ended_in_engine(self) -> bool:
        """True if the engine has ended all choices."""
        return self._num_in_engine == 0

    @property
    def error(self) -> tuple[str, str] | None:
        """Error of the first choice that failed."""
        return next((choice.error for choice in self.choices if choice.error is not None), None)

    def add_output(self, output: EngineOutput, now_s: float) -> bool:
        """Add a step's output for one of the choices. Return whether the request has ended."""
        if self.ended:
            return False
        if output.started:
            self._started = True
            self.num_cached_tokens = max(self.num_cached_tokens, output.num_cached_tokens)
        if output.finished:
            self._num_in_engine -= 1
        if output.prompt_logprobs:
            self.prompt_logprobs = output.prompt_logprobs
        if output.embedding:
            self.embedding = output.embedding
        choice = self.choices[output.choice]
        if not choice.ended:
            choice.add_output(output, now_s, self._num_tokens_left())
        if output.error is not None and not self._started:
            # The engine refuses a whole request with one output.
            self._num_in_engine = 0
            for other in self.choices:
                other.error = output.error
        limit = self.request.cancel_after_tokens
        if limit and self.num_tokens >= limit and not self.ended:
            self.cancel()
        return self.ended

    def cancel(self) -> None:
        """Mark the request as cancelled: the caller wants no more tokens."""
        self.cancelled = True

    def _num_tokens_left(self) -> int | None:
        """Return the number of tokens until the request is cancelled; None: no limit."""
        limit = self.request.cancel_after_tokens
        return None if limit is None else max(0, limit - self.num_tokens)

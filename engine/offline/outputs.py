"""Outputs that ``LLM`` returns."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import msgspec

from millrace.engine.offline.chat import tool_calls
from millrace.engine.offline.generated import Generated, OfflineCompletion
from millrace.schemas.errors import MillraceError
from millrace.schemas.frames import FinishReason, TokenLogprob


class CompletionOutput(msgspec.Struct, frozen=True, kw_only=True):
    """Completion of a prompt.

    Attributes:
        finish_reason: None for a completion that failed.
        stop_reason: The stop string or the stop token id that ended it.
        logprobs: An entry for each token if ``SamplingParams.logprobs`` is set.
        cumulative_logprob: Set for a beam search.
        tool_calls: Calls of a chat with tools, in the format of OpenAI's API.
        error: (code, message) if the completion failed.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    cumulative_logprob: float | None = None
    tool_calls: tuple[dict[str, object], ...] = ()
    error: tuple[str, str] | None = None


class GenerationOutput(msgspec.Struct, frozen=True, kw_only=True):
    """Completions of one prompt: ``SamplingParams.n`` of them.

    ``text``, ``token_ids`` and other properties are those of the first completion.
    ``prompt_logprobs`` has an entry for each token of the prompt, None for the first, if
    ``SamplingParams.prompt_logprobs`` is set. ``num_cached_tokens`` of the prompt were found in the
    prefix cache.
    """

    prompt_token_ids: tuple[int, ...]
    completions: tuple[CompletionOutput, ...]
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
    num_cached_tokens: int = 0

    @property
    def text(self) -> str:
        return self.completions[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.completions[0].token_ids

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.completions[0].finish_reason

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...]:
        return self.completions[0].logprobs

    @property
    def tool_calls(self) -> tuple[dict[str, object], ...]:
        return self.completions[0].tool_calls


class GenerationDelta(msgspec.Struct, frozen=True, kw_only=True):
    """New tokens of one completion in a step.

    ``prompt`` is the prompt's position in the call, ``choice`` the completion's among those of the
    prompt. The last delta of a completion has its ``finish_reason``, or its ``error`` as (code,
    message). The texts of the deltas of a completion, joined, are its text.
    """

    prompt: int
    choice: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    error: tuple[str, str] | None = None


class EmbeddingOutput(msgspec.Struct, frozen=True, kw_only=True):
    """Embedding of one text: [hidden_size] numbers."""

    embedding: tuple[float, ...]
    num_prompt_tokens: int


class ClassificationOutput(msgspec.Struct, frozen=True, kw_only=True):
    """Label of one text with the highest probability, and ``probabilities`` by label."""

    label: str
    probabilities: dict[str, float]
    num_prompt_tokens: int


class ScoreOutput(msgspec.Struct, frozen=True, kw_only=True):
    """Relevance of one text to another by a cross-encoder, or the cosine of their embeddings, from
    -1 to 1."""

    score: float
    num_prompt_tokens: int


class RequestFailedError(MillraceError, code="request_failed"):
    """Error of a call in which the engine failed ``num_failed`` requests.

    The others have ended well. ``reason`` is the (code, message) of the first failure. ``outputs``
    are those of a call that generates, failed ones included, in the order of the prompts.
    """

    def __init__(self, answers: Sequence[Generated]) -> None:
        failed = [answer for answer in answers if answer.error is not None]
        first = failed[0].error
        assert first is not None
        self.reason = first
        self.num_failed = len(failed)
        self.outputs = [
            generation_output(answer) for answer in answers if answer.request.job.pooling is None
        ]
        code, message = first
        super().__init__(
            f"{self.num_failed} of {len(answers)} requests failed. The first: {message} ({code})"
        )


def generation_output(generated: Generated) -> GenerationOutput:
    """Convert the answer to a request that has ended."""
    return GenerationOutput(
        prompt_token_ids=generated.request.job.prompt_token_ids or (),
        completions=tuple(_completion(generated, choice) for choice in generated.choices),
        prompt_logprobs=generated.prompt_logprobs,
        num_cached_tokens=generated.num_cached_tokens,
    )


def _completion(generated: Generated, choice: OfflineCompletion) -> CompletionOutput:
    request, text = generated.request, "".join(choice.text)
    sampling = request.job.sampling
    calls = []
    if request.tool_format is not None:
        calls = tool_calls(text, request.tool_format, request.tools, request.freeform)
    return CompletionOutput(
        text=text,
        token_ids=tuple(choice.token_ids),
        finish_reason=choice.finish_reason,
        stop_reason=_stop_reason(choice, sampling.stop_token_ids),
        logprobs=tuple(choice.logprobs),
        cumulative_logprob=choice.cumulative_logprob if sampling.use_beam_search else None,
        tool_calls=tuple(calls),
        error=choice.error,
    )


def _stop_reason(choice: OfflineCompletion, stop_token_ids: Sequence[int]) -> str | int | None:
    if choice.finish_reason is not FinishReason.STOP:
        return None
    if choice.stream.stop_string is not None:
        return choice.stream.stop_string
    last = choice.token_ids[-1] if choice.token_ids else None
    return last if last in stop_token_ids else None


class DeltaReader:
    """Reader of the deltas of one answer as it grows."""

    def __init__(self, prompt: int) -> None:
        self._prompt = prompt
        self._num_read: dict[int, tuple[int, int]] = {}
        self._ended: set[int] = set()

    def read(self, generated: Generated) -> Iterator[GenerationDelta]:
        """Yield the new tokens of each completion since the last call."""
        for index, choice in enumerate(generated.choices):
            num_tokens, num_texts = self._num_read.get(index, (0, 0))
            grown = len(choice.token_ids) > num_tokens
            if index in self._ended or not (grown or choice.ended):
                continue
            self._num_read[index] = len(choice.token_ids), len(choice.text)
            if choice.ended:
                self._ended.add(index)
            yield GenerationDelta(
                prompt=self._prompt,
                choice=index,
                text="".join(choice.text[num_texts:]),
                token_ids=tuple(choice.token_ids[num_tokens:]),
                logprobs=tuple(choice.logprobs[num_tokens:]),
                finish_reason=choice.finish_reason,
                error=choice.error,
            )


def unit_vector(values: Sequence[float]) -> tuple[float, ...]:
    """Scale a vector to length 1. A vector of zeros stays one of zeros."""
    length = math.sqrt(math.fsum(value * value for value in values)) or 1.0
    return tuple(value / length for value in values)

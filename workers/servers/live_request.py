"""A request that an inference server has."""

from __future__ import annotations

import asyncio

from millrace.engine.types import EngineRequest
from millrace.schemas.frames import FinishReason
from millrace.workers.servers.dialect import AnswerPart
from millrace.workers.servers.guided import Guide


class LiveRequest:
    """What is known of it: ``token_ids`` are all of its completion, those delivered before it came
    here included, and ``max_total_tokens`` bounds prompt and completion. Where the server decides
    by tokens of its own that there are as many as were asked for, ``window_tokens`` does."""

    def __init__(
        self,
        request: EngineRequest,
        max_total_tokens: int,
        added_s: float,
        window_tokens: int | None = None,
    ) -> None:
        self.request = request
        self.token_ids = list(request.output_token_ids)
        self.added_s = added_s
        self.first_token_s: float | None = None
        self.last_token_s = added_s
        self.num_cached_tokens = 0
        self.is_resampled = False
        self.num_calls = 0
        self.task: asyncio.Task[None] | None = None
        self.guide: Guide | None = None
        self.num_hidden = 0
        self._server_counts = window_tokens is not None
        self._wanted_tokens = max_total_tokens - len(request.prompt_token_ids)
        longest_tokens = max_total_tokens if window_tokens is None else window_tokens
        self._max_tokens = longest_tokens - len(request.prompt_token_ids)
        sampling = request.sampling
        self._ends = frozenset(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            self._ends |= frozenset(request.eos_token_ids)

    @property
    def is_sampled(self) -> bool:
        """Whether its tokens are drawn."""
        return self.request.sampling.temperature > 0

    @property
    def num_prompt_tokens(self) -> int:
        """What the server has to know before the next token."""
        return len(self.request.prompt_token_ids) + len(self.request.output_token_ids)

    @property
    def num_uncached_prompt_tokens(self) -> int:
        """Of these, what it had to compute."""
        return max(0, self.num_prompt_tokens - self.num_cached_tokens)

    @property
    def num_outstanding_tokens(self) -> int:
        """Still to be computed, if nothing stops early."""
        prefill = 0 if self.first_token_s is not None else self.num_prompt_tokens
        return prefill + max(0, self._wanted_tokens - len(self.token_ids))

    def accept(
        self, part: AnswerPart, *, is_complete: bool = False
    ) -> tuple[tuple[int, ...], FinishReason | None]:
        """The tokens of a part that belong to the completion, and how it ends by them.
        ``is_complete``: its grammar has come to its end. A server that stops before it has made as
        many as were asked for has not ended it."""
        # A later call finds in the cache what the first one put there.
        if part.num_cached_tokens is not None and self.num_calls == 1:
            self.num_cached_tokens = part.num_cached_tokens
        accepted: list[int] = []
        for token_id in part.token_ids:
            accepted.append(token_id)
            self.token_ids.append(token_id)
            num_tokens = len(self.token_ids)
            if token_id in self._ends and num_tokens > self.request.sampling.min_tokens:
                return tuple(accepted), FinishReason.STOP
            if num_tokens >= self._max_tokens:
                return tuple(accepted), FinishReason.LENGTH
        if is_complete:
            return tuple(accepted), FinishReason.STOP
        if part.finish_reason is FinishReason.LENGTH and not self._server_counts:
            return tuple(accepted), None
        if part.finish_reason is FinishReason.STOP and not self.request.sampling.ignore_eos:
            # Many servers keep the token by which a sequence ends to themselves.
            end = self.request.eos_token_ids[:1]
            self.token_ids.extend(end)
            return (*accepted, *end), FinishReason.STOP
        return tuple(accepted), part.finish_reason

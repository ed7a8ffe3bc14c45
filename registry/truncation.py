"""How much of a prompt that is too long stays."""

from __future__ import annotations

from millrace.schemas.errors import ParameterError
from millrace.schemas.jobs import Job


def num_kept_tokens(job: Job, window_tokens: int) -> int | None:
    """How many tokens of the job's prompt stay at most, if a longer one is to be truncated. Raises
    ParameterError."""
    wanted = job.truncate_prompt_tokens
    if wanted is None:
        return None
    if wanted == -1:
        room = 0 if job.pooling is not None else (job.sampling.max_tokens or 1)
        return max(window_tokens - room, 1)
    if not 1 <= wanted <= window_tokens:
        raise ParameterError(
            "truncate_prompt_tokens",
            f"truncate_prompt_tokens must be -1 or between 1 and {window_tokens}, got {wanted}",
        )
    return wanted

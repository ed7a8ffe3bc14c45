"""A sequence as a model that drafts for it has it."""

from __future__ import annotations

import msgspec

from millrace.engine.sampling.sampler import SamplingState
from millrace.engine.step.sequence import Sequence


class Followed:
    """``copy`` is with the target's tokens and blocks, of which the draft has keys and values of
    its own for the first ``copy.num_computed_tokens``.

    It has nothing of the tokens before ``start``; the first of its keys and values is at the
    beginning of the block ``first_block`` of the target's. If it ``keeps_own``, it keeps what it
    computed of tokens that it said itself and that came.
    """

    __slots__ = (
        "_blocks",
        "_first_block",
        "_keeps_own",
        "_num_followed",
        "_num_preemptions",
        "_start",
        "copy",
    )

    def __init__(
        self, sequence: Sequence, *, start: int = 0, first_block: int = 0, keeps_own: bool = True
    ) -> None:
        sampling = msgspec.structs.replace(
            sequence.request.sampling, logprobs=None, prompt_logprobs=None
        )
        request = msgspec.structs.replace(
            sequence.request, adapter=None, output_token_ids=(), sampling=sampling
        )
        self.copy = Sequence(
            request,
            arrival=sequence.arrival,
            key=sequence.key,
            max_total_tokens=sequence.max_total_tokens,
        )
        self.copy.sampling_state = SamplingState(sampling, sequence.key, None)
        self.copy.token_ids = list(sequence.token_ids)
        self.copy.num_computed_tokens = start
        self._start = start
        self._first_block = first_block
        self._keeps_own = keeps_own
        self._num_followed = len(sequence.token_ids)
        self._blocks: list[int] = []
        self._num_preemptions = sequence.num_preemptions

    def follow(self, sequence: Sequence, block_size: int) -> None:
        """Go on from the tokens and blocks that the target has now."""
        copy, tokens = self.copy, sequence.token_ids
        valid = copy.num_computed_tokens
        if self._num_preemptions != sequence.num_preemptions:
            self._num_preemptions, valid = sequence.num_preemptions, self._start
        num_blocks = max(0, _num_equal(self._blocks, sequence.block_table) - self._first_block)
        valid = min(valid, self._start + num_blocks * block_size)
        # Of what it said itself, that much came.
        begin, end = self._num_followed, min(len(copy.token_ids), len(tokens))
        while self._keeps_own and begin < end and copy.token_ids[begin] == tokens[begin]:
            begin += 1
        copy.num_computed_tokens = min(valid, begin, len(tokens) - 1)
        copy.token_ids[self._num_followed :] = tokens[self._num_followed :]
        self._num_followed = len(tokens)
        copy.block_table = sequence.block_table[self._first_block :]
        self._blocks = list(sequence.block_table)


def _num_equal(some: list[int], others: list[int]) -> int:
    """How many of the first are the same."""
    for index, (one, other) in enumerate(zip(some, others, strict=False)):
        if one != other:
            return index
    return min(len(some), len(others))

"""What proposes tokens on an engine, as its settings say."""

from __future__ import annotations

from collections.abc import Sequence as Rows

from millrace.engine.config import ResolvedEngineConfig
from millrace.engine.devices.cpu.eagle_head import HeadRunner
from millrace.engine.kv.block_tables import BlockTables
from millrace.engine.scheduling.cost_model import CostModel
from millrace.engine.speculation.draft import Draft, Followed
from millrace.engine.speculation.speculator import Speculator
from millrace.engine.step.features import Features, HeadInputs
from millrace.engine.step.runner import DraftRunner, Runner
from millrace.engine.step.sequence import Sequence
from millrace.schemas.errors import ConfigError


class HeadDraft(Draft):
    """A draft that computes each token beside the hidden states that its target had for the token
    before, or behind the last that the target computed beside its own.

    Of tokens that the target did not compute, as they were in the prefix cache, or that wait too
    long, there are no such states: the head begins behind them, with positions of its own. So it
    does where its blocks were taken away, as by a preemption.
    """

    def draft(self, wanted: Rows[tuple[Sequence, int]]) -> list[list[int]]:
        able = [index for index, (sequence, _) in enumerate(wanted) if _has_features(sequence)]
        said: list[list[int]] = [[] for _ in wanted]
        for index, token_ids in zip(
            able, super().draft([wanted[index] for index in able]), strict=True
        ):
            said[index] = token_ids
        return said

    def _followed(self, sequence: Sequence) -> Followed:
        features: Features = sequence.features
        followed: Followed | None = sequence.suggestions.drafted
        start = features.begin + 1
        if followed is not None:
            followed.follow(sequence, self._block_size)
            start = followed.copy.features.start
        if followed is None or followed.copy.num_computed_tokens <= features.begin:
            start = features.begin + 1
            first_block = features.begin // self._block_size
            followed = Followed(sequence, start=start, first_block=first_block, keeps_own=False)
            sequence.suggestions.drafted = followed
            followed.follow(sequence, self._block_size)
        followed.copy.features = HeadInputs(features, start)
        return followed


def _has_features(sequence: Sequence) -> bool:
    """Whether there are those of the last token but one, which every draft begins with."""
    features: Features | None = sequence.features
    last = len(sequence.token_ids) - 2
    return features is not None and features.begin <= last < features.end


def make_speculator(
    config: ResolvedEngineConfig,
    tables: BlockTables,
    costs: CostModel,
    target: Runner,
    draft: DraftRunner | None,
) -> Speculator | None:
    """None where nothing is proposed. Raises ConfigError where that was asked for and would change
    what is drawn."""
    if config.speculation is None:
        return None
    if not target.is_row_exact:
        if not config.speculation.is_asked:
            return None
        raise ConfigError(
            "engine.speculation: several tokens of a sequence are computed in one step, bit for "
            "bit as one by one, by the compiled kernels of a CPU in bfloat16 and by those of a GPU "
            "with engine.deterministic, without experts only; leave it out or set it to off."
        )
    drafts: Draft | None = None
    if draft is not None:
        kind = HeadDraft if isinstance(draft, HeadRunner) else Draft
        drafts = kind(draft, costs)
    return Speculator(
        tables,
        costs,
        config.max_batch_tokens,
        config.itl_bound_s,
        drafts,
        max_drawn_rows=target.max_drawn_rows,
    )

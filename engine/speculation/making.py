"""Construction of an engine's speculator from its settings."""

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
    """EAGLE-3 draft, which computes each token from the target's hidden states of the token before.

    After the last token that the target computed, it uses its own hidden states. The target has no
    hidden states for tokens from the prefix cache, or for tokens that waited too long. Then the
    head starts after them, with positions of its own. It also starts again when its blocks were
    freed, as by a preemption.
    """

    def draft(self, wanted: Rows[tuple[Sequence, int]]) -> list[list[int]]:
        able = [index for index, (sequence, _) in enumerate(wanted) if _has_features(sequence)]
        proposals: list[list[int]] = [[] for _ in wanted]
        for index, token_ids in zip(
            able, super().draft([wanted[index] for index in able]), strict=True
        ):
            proposals[index] = token_ids
        return proposals

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
    """Return whether there are features of the last token but one, with which every draft
    begins."""
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
    """Make the speculator; None if no tokens are proposed.

    Raises ConfigError if speculation was asked for and would change the drawn tokens.
    """
    if config.speculation is None:
        return None
    if not target.is_row_exact:
        if not config.speculation.is_asked:
            return None
        raise ConfigError(
            "engine.speculation: a step with several tokens of a sequence has the same bits as "
            "single tokens only with the compiled kernels of a CPU in bfloat16, or on a GPU with "
            "engine.deterministic, and without experts; leave it out or set it to off."
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

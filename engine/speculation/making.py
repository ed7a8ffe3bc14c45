"""What proposes tokens on an engine, as its settings say."""

from __future__ import annotations

from millrace.engine.devices.cpu.eagle_head import HeadRunner
from millrace.engine.kv.block_tables import BlockTables
from millrace.engine.scheduling.cost_model import CostModel
from millrace.engine.speculation.draft import Draft
from millrace.engine.speculation.head_draft import HeadDraft
from millrace.engine.speculation.speculator import Speculator
from millrace.engine.step.runner import DraftRunner, Runner
from millrace.engine.step.settings import speculates
from millrace.schemas.config import EngineConfig


def make_speculator(
    config: EngineConfig,
    tables: BlockTables,
    costs: CostModel,
    target: Runner,
    draft: DraftRunner | None,
) -> Speculator | None:
    """By settled settings; None where nothing is proposed. Raises ConfigError where it would change
    what is drawn."""
    if target.num_stages > 1:
        return None  # the next step begins before the tokens of this one are known
    if not speculates(config, is_row_exact=target.is_row_exact, on_device=target.overlaps):
        return None
    drafts: Draft | None = None
    if draft is not None:
        kind = HeadDraft if isinstance(draft, HeadRunner) else Draft
        drafts = kind(draft, costs)
    return Speculator(
        tables,
        costs,
        config.max_batch_tokens,
        config.itl_bound_ms / 1e3,
        drafts,
        max_drawn_rows=config.max_num_sequences if target.overlaps else None,
    )

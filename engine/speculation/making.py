"""What proposes tokens on an engine, as its settings say."""

from __future__ import annotations

from millrace.engine.config import ResolvedEngineConfig
from millrace.engine.devices.cpu.head_runner import HeadRunner
from millrace.engine.kv.block_tables import BlockTables
from millrace.engine.scheduling.cost_model import CostModel
from millrace.engine.speculation.draft import Draft
from millrace.engine.speculation.head_draft import HeadDraft
from millrace.engine.speculation.speculator import Speculator
from millrace.engine.step.runners import DraftRunner, Runner
from millrace.schemas.errors import ConfigError


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
        max_drawn_rows=config.max_num_sequences if target.overlaps else None,
    )

"""Shares and links of the ranks of a group."""

from __future__ import annotations

from millrace.engine.config import ResolvedEngineConfig
from millrace.engine.kernels.build import cpu_library
from millrace.engine.kernels.rank_view import MAX_RANKS
from millrace.engine.kernels.stage_link import StageLink
from millrace.engine.models.shard import check_shard
from millrace.engine.parallel.control import Join, JoinDevices
from millrace.engine.transfer.addresses import host_and_port
from millrace.registry.checkpoints.checkpoint import ModelConfig
from millrace.registry.checkpoints.shard import Shard, vocabulary_range
from millrace.runtime.addresses import is_loopback
from millrace.schemas.config import EngineConfig
from millrace.schemas.errors import ConfigError


def shard_of(rank: int, engine: ResolvedEngineConfig) -> Shard:
    """Return the share of a rank; ranks are numbered through all stages."""
    stage, own = divmod(rank, engine.tensor_parallel)
    return Shard(
        own, engine.tensor_parallel, engine.expert_parallel, stage, engine.pipeline_parallel
    )


def make_link(join: Join | JoinDevices, number: int = 0, *, index: int) -> StageLink:
    """Open an end of a link, for its writer or reader ``index``.

    ``number`` selects the link after that stage. For devices it is the link of rank 0's messages.
    """
    if isinstance(join, JoinDevices):
        fd, shape = join.link_fd, join.link_shape
    else:
        fd, shape = join.link_fds[number], join.link_shapes[number]
    return StageLink(cpu_library(), fd, shape, index=index, timeout_s=join.config.rank_timeout_s)


def num_local_ranks(engine: ResolvedEngineConfig) -> int:
    """Return the number of ranks on rank 0's host."""
    return engine.tensor_parallel * (engine.pipeline_parallel - engine.remote_stages)


def vocabulary_widths(config: ModelConfig, size: int) -> list[int]:
    """Return the number of tokens whose logits each of ``size`` ranks computes."""
    return [len(vocabulary_range(config.vocab_size, Shard(rank, size))) for rank in range(size)]


def check_group(config: ModelConfig, engine: ResolvedEngineConfig) -> None:
    """Raise ConfigError for settings that no group of ranks of the model supports."""
    if engine.rank_timeout_s <= 0:
        raise ConfigError(f"engine.rank_timeout_s must be above 0, got {engine.rank_timeout_s}.")
    most = MAX_RANKS if engine.pipeline_parallel == 1 else MAX_RANKS - 1
    if engine.tensor_parallel > most:
        raise ConfigError(
            f"engine.tensor_parallel is {engine.tensor_parallel}. A stage has at most {most} ranks."
        )
    check_shard(config, engine.tensor_parallel, engine.expert_parallel, engine.pipeline_parallel)


def check_remote_stages(engine: EngineConfig) -> None:
    """Raise ConfigError for an invalid number or address of remote stages."""
    if not 0 <= engine.remote_stages < engine.pipeline_parallel:
        raise ConfigError(
            f"engine.remote_stages is {engine.remote_stages}, but must be from 0 to "
            f"{engine.pipeline_parallel - 1}, because the first stage of engine.pipeline_parallel "
            "runs here."
        )
    if not engine.remote_stages:
        return
    host, _ = stages_address(engine.stages_address)
    if not engine.stages_token and not is_loopback(host):
        raise ConfigError(
            f"engine.stages_address is {engine.stages_address}, which other machines can reach. "
            "Set engine.stages_token, for example by MILLRACE_WORKER__ENGINE__STAGES_TOKEN_FILE, "
            "and give millrace stages the same token."
        )


def stages_address(address: str) -> tuple[str, int]:
    """Return the host and port at which stages of other hosts join. Raises ConfigError."""
    return host_and_port(address, "engine.stages_address")

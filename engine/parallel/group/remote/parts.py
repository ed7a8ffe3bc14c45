"""The parts of a KV cache that are on other hosts."""

from __future__ import annotations

from millrace.engine.kv.cache_commands import CacheCommand, CheckBlocks
from millrace.engine.parallel.group.members import Members
from millrace.engine.parallel.group.pipeline import Pipeline
from millrace.engine.parallel.group.step_wire import PartCommand


class RemoteParts:
    """See ``OtherParts``: commands go from stage to stage like steps, and so are obeyed between
    those before them and those behind them; answers come by the sockets of the ranks."""

    def __init__(
        self, pipeline: Pipeline, members: Members, block_bytes: int, timeout_s: float
    ) -> None:
        """``block_bytes``: of one block in all of these parts. An answer is given up after
        ``timeout_s``."""
        self.block_bytes = block_bytes
        self._pipeline = pipeline
        self._members = members
        self._timeout_s = timeout_s

    def tell(self, command: CacheCommand) -> None:
        """Have each part obey. Raises RankLostError."""
        self._pipeline.tell(PartCommand(0, command))

    def ask(self, command: CheckBlocks) -> list[bool]:
        """Which of the blocks hold only finite numbers in all of these parts."""
        number = self._members.expect_checked()
        self._pipeline.tell(PartCommand(number, command))
        return self._members.wait_checked(number, self._timeout_s)

"""Rank 0's runner of a model over several devices."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Rows

import torch

from millrace.engine.adapters.rows import AdapterWeights
from millrace.engine.devices.cuda.runner import DeviceRunner
from millrace.engine.devices.cuda.steps import ALL_LAYERS, Stage, StepParts, ToldStep
from millrace.engine.kernels.ranks import RanksFailedError
from millrace.engine.parallel.device_group.lead import Lead
from millrace.engine.parallel.device_group.messages import WantedLogits
from millrace.engine.scheduling.schedule import ScheduledSequence
from millrace.engine.step.in_flight_step import ChosenTokens, InFlightStep
from millrace.schemas.models.adapters import AdapterRef


class DeviceGroupRunner(DeviceRunner):
    """Tells the other ranks what it tells its own device, before it does, and samples for all of
    them: the tokens that are chosen go to every rank's state within the step.

    A rank that ends or hangs ends the group, with RankLostError in whatever is launched or read
    next; ``watch`` says whom to wake then.
    """

    def __init__(
        self, parts: StepParts, lead: Lead, *, is_row_exact: bool, stage: Stage = ALL_LAYERS
    ) -> None:
        super().__init__(parts, is_row_exact=is_row_exact, stage=stage)
        self._lead = lead
        self._is_told = False

    @property
    def pids(self) -> list[int]:
        """Of the processes of the other ranks."""
        return self._lead.members.pids

    def watch(self, wake: Callable[[], None]) -> None:
        """Call ``wake``, on another thread, once a rank has ended."""
        self._lead.watch(wake)

    def check(self) -> None:
        """Raise RankLostError if the group has failed."""
        self._lead.check()

    def load_adapter(self, adapter: AdapterRef, slot: int, *, max_rank: int) -> AdapterWeights:
        """Have every rank read its slices of an adapter into a slot, see ``DeviceRunner``. Raises
        AdapterError, ModelSourceError."""
        if not self.takes_adapters:
            return super().load_adapter(adapter, slot, max_rank=max_rank)
        lead = self._lead
        number = lead.members.load_adapter(adapter, max_rank, slot=slot, num_posted=lead.num_posted)
        try:
            own = super().load_adapter(adapter, slot, max_rank=max_rank)
            lead.members.wait_loaded(number)
        finally:
            lead.members.drop_adapter(number)
        return own

    def launch(self, plan: Rows[ScheduledSequence]) -> InFlightStep:
        """See ``DeviceRunner``. Raises RankLostError."""
        self._lead.check()
        self._is_told = False
        step = super().launch(plan)

        def read() -> ChosenTokens:
            with self._lead.waiting():
                return step.read()

        return step._replace(read=read)

    def _failed(self, error: Exception) -> BaseException:
        """What goes wrong before the others were told is of no matter to them."""
        if self._is_told or isinstance(error, RanksFailedError):
            return self._lead.failure(error)
        return super()._failed(error)

    def _tell_all(self, step: ToldStep) -> None:
        self._lead.post(step)
        self._is_told = True
        self._tell(step)

    def _choose(
        self,
        wanted: torch.Tensor,
        state_rows: torch.Tensor,
        token_indices: torch.Tensor,
        chosen: torch.Tensor,
    ) -> None:
        super()._choose(wanted, state_rows, token_indices, chosen)
        self._lead.ranks.share(chosen)

    def _logits(self, rows: torch.Tensor) -> torch.Tensor:
        logits = self._lead.ranks.gather(super()._logits(rows), self.config.vocab_size)
        assert logits is not None, "rank 0 gathers"
        return logits

    def _scored_logits(self, rows: torch.Tensor) -> torch.Tensor:
        self._lead.post(WantedLogits(len(rows)))
        self._lead.ranks.share(rows)
        return self._logits(rows)

    def _host_logits(self, places: list[int]) -> torch.Tensor:
        with self._lead.waiting():
            return super()._host_logits(places)

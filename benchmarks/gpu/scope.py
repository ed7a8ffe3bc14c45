"""What a section is given: the device, its time, the ceilings, and where its figures go."""

from __future__ import annotations

import gc
import itertools
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from benchmarks.gpu.report import Ceilings, Detail, Row, RunSettings
from tests.support.interpreter import prepare_once


class WrongResultError(Exception):
    """What was computed is not what the reference computes."""


class Turns:
    """Every ``count``-th of what comes is ours, the ``first`` being the first."""

    def __init__(self, first: int, count: int) -> None:
        self._numbers = itertools.count()
        self._first = first
        self._count = count

    def take(self) -> bool:
        """Whether the next one is ours."""
        return next(self._numbers) % self._count == self._first


class Scope:
    """What a section is given. ``earlier`` are the rows of the
    sections before. Rows are handed over as they are made, so that those of a section that is
    killed later are kept. With ``rehearsal``, kernels are run once each, as it takes them, so that
    they are compiled, and nothing is measured.
    """

    def __init__(
        self,
        section: str,
        settings: RunSettings,
        *,
        deadline_s: float,
        ceilings: Ceilings | None = None,
        earlier: Sequence[Row] = (),
        hand_over: Callable[[Row | Ceilings], None] = lambda _: None,
        rehearsal: Turns | None = None,
    ) -> None:
        if settings.smoke:
            prepare_once()
        self.section = section
        self.settings = settings
        self.smoke, self.seed, self.sweeps = settings.smoke, settings.seed, settings.sweeps
        self.rehearsal = rehearsal
        self.device = torch.device("cpu" if self.smoke else "cuda")
        # Triton's interpreter does not multiply matrices of bfloat16.
        self.dtype = torch.float32 if self.smoke else torch.bfloat16
        self._deadline_s = deadline_s
        self._ceilings = ceilings
        self._earlier = earlier
        self._hand_over = hand_over

    @property
    def left_s(self) -> float:
        """Seconds until the section is ended."""
        return self._deadline_s - time.monotonic()

    @property
    def ceilings(self) -> Ceilings:
        """Raises RuntimeError if nobody has measured them."""
        if self._ceilings is None:
            raise RuntimeError("the ceilings could not be measured")
        return self._ceilings

    def sweeps_kernel(self, name: str) -> bool:
        """Return whether the tiles of this kernel are swept."""
        kernels = self.settings.kernels
        return not kernels or any(part in name for part in kernels)

    def set_ceilings(self, ceilings: Ceilings) -> None:
        self._ceilings = ceilings
        self._hand_over(ceilings)

    def generator(self, stream: int = 0) -> torch.Generator:
        """Random numbers on the device that depend on the run's seed and ``stream`` alone."""
        return torch.Generator(self.device).manual_seed(self.seed * 1_000_003 + stream)

    def normal(self, generator: torch.Generator, *shape: int, std: float = 1.0) -> torch.Tensor:
        """Normal numbers on the device, in ``dtype``."""
        numbers = torch.empty(shape, dtype=self.dtype, device=self.device)
        return numbers.normal_(std=std, generator=generator)

    def free_memory(self) -> None:
        """Give the device back the memory of what was dropped."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def emit(
        self,
        name: str,
        value: float,
        unit: str,
        *,
        ceiling: float | None = None,
        share: float | None = None,
        details: Mapping[str, Detail] | None = None,
    ) -> None:
        """Hand over one figure. A rate's share of its ceiling is worked out here."""
        if share is None and ceiling:
            share = ceiling / value if unit in ("ms", "us", "s") else value / ceiling
        row = Row(
            section=self.section,
            name=name,
            value=value,
            unit=unit,
            ceiling=ceiling,
            share=share,
            details=dict(details or {}),
        )
        self._hand_over(row)

    def fail(self, name: str, failure: str) -> None:
        self._hand_over(Row(section=self.section, name=name, failure=failure))

    def out_of_time(self, name: str, needed_s: float = 0.0) -> bool:
        """Whether less than ``needed_s`` is left, which is then said in a row."""
        if self.left_s > needed_s:
            return False
        self.fail(name, "the section's time was over")
        return True

    @contextmanager
    def case(self, name: str) -> Iterator[None]:
        """What goes wrong inside becomes a failed row, and the section goes on; but for an error
        that the device does not recover from."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.fail(name, describe(error))
            if is_fatal(error):
                raise

    def value_of(self, section: str, name: str) -> float | None:
        """What an earlier section measured, if it did."""
        for row in self._earlier:
            if (row.section, row.name) == (section, name):
                return row.value
        return None


def describe(error: Exception) -> str:
    """One line."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"


def is_fatal(error: Exception) -> bool:
    """Whether nothing can be computed on the device in this process any more."""
    text = str(error)
    return "illegal memory access" in text or "device-side assert" in text or "unspecified" in text

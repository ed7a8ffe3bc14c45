"""Scope of a section: its device, its time, the ceilings, and the output of its figures."""

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
    """Failure of a check: the result differs from the reference."""


class Turns:
    """Selection of every ``count``-th call, beginning with number ``first``."""

    def __init__(self, first: int, count: int) -> None:
        self._numbers = itertools.count()
        self._first = first
        self._count = count

    def take(self) -> bool:
        """Return whether the next call is selected."""
        return next(self._numbers) % self._count == self._first


class Scope:
    """Scope of a section.

    ``earlier`` are the rows of earlier sections. Rows are handed over when they are made, so that
    the rows of a section that is killed later are kept. With ``rehearsal``, each kernel runs once
    to be compiled, and nothing is measured.
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
        # Triton's interpreter does not multiply bfloat16 matrices.
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
        """Ceilings of the run. Raises RuntimeError if they could not be measured."""
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
        """Return a generator on the device, seeded by the run's seed and ``stream`` only."""
        return torch.Generator(self.device).manual_seed(self.seed * 1_000_003 + stream)

    def normal(self, generator: torch.Generator, *shape: int, std: float = 1.0) -> torch.Tensor:
        """Return normal numbers on the device, in ``dtype``."""
        numbers = torch.empty(shape, dtype=self.dtype, device=self.device)
        return numbers.normal_(std=std, generator=generator)

    def free_memory(self) -> None:
        """Release the memory of dropped tensors."""
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
        """Hand over one figure, with a rate's share of its ceiling."""
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
        """Return whether less than ``needed_s`` is left, and report that in a row."""
        if self.left_s > needed_s:
            return False
        self.fail(name, "the section's time was over")
        return True

    @contextmanager
    def case(self, name: str) -> Iterator[None]:
        """Turn an error inside into a failed row and go on, unless the device is lost."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.fail(name, describe(error))
            if is_fatal(error):
                raise

    def value_of(self, section: str, name: str) -> float | None:
        """Return the figure of an earlier section, or None."""
        for row in self._earlier:
            if (row.section, row.name) == (section, name):
                return row.value
        return None


def describe(error: Exception) -> str:
    """Format an error in one line."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"


def is_fatal(error: Exception) -> bool:
    """Return whether the device cannot compute any more in this process."""
    text = str(error)
    return "illegal memory access" in text or "device-side assert" in text or "unspecified" in text

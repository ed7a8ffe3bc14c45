"""Time of a model's step over several H200, by formulas, from the rates of one device.

    python -m benchmarks.parallel --only steps [--save]

No group of GPUs was run: all figures are derived. The tables are those of docs/parallel-steps.md,
which has the formulas. 4 devices of one host compute a Llama 3.1 70B. A 405B runs on 8 devices of
each of two hosts, as two stages. The last table has the same steps by ``millrace simulate``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from benchmarks.parallel.formulas import (
    GROUPS,
    H200,
    MOST_SLOTS,
    NUM_CANDIDATES,
    TPOT_MS,
    Device,
    HeadGather,
    Largest,
    Simulated,
    Step,
    head_gather,
    largest,
    simulated,
    step_of,
)
from benchmarks.support.command import PartResult

FILE = "parallel_steps.json"
_BATCHES = (1, 8, 32, 64, 128, 256)
_SIMULATED_BATCHES = (1, 64, 256)
_CONTEXTS = (1_024, 4_096)


class Results(msgspec.Struct, frozen=True, kw_only=True):
    """All results."""

    device: Device
    steps: tuple[Step, ...]
    largest: tuple[Largest, ...]
    head_gathers: tuple[HeadGather, ...]
    simulated: tuple[Simulated, ...]


def results() -> Results:
    """Compute everything that the page shows."""
    return Results(
        device=H200,
        steps=tuple(
            step_of(group, batch, context)
            for group in GROUPS
            for batch in _BATCHES
            for context in _CONTEXTS
        ),
        largest=tuple(largest(group, context) for group in GROUPS for context in _CONTEXTS),
        head_gathers=tuple(head_gather(GROUPS[0], batch, _CONTEXTS[0]) for batch in _BATCHES),
        simulated=tuple(
            simulated(GROUPS[0], batch, context)
            for context in _CONTEXTS
            for batch in _SIMULATED_BATCHES
        ),
    )


def tables(found: Results) -> Iterator[tuple[str, list[str]]]:
    """Yield each table's title and lines."""
    for group in GROUPS:
        steps = [step for step in found.steps if step.group == group.name]
        yield f"{group.name}, ms of a step", _steps_table(steps)
    yield f"The largest batch within {TPOT_MS:g} ms", _largest_table(found.largest)
    title = f"{GROUPS[0].name}, what rank 0 gathers of the vocabulary, µs"
    yield title, _gather_table(found.head_gathers)
    yield f"{GROUPS[0].name}, TPOT in ms, derived and simulated", _simulated_table(found.simulated)


def _table(names: Sequence[str], rows: Sequence[Sequence[str]], num_left: int = 0) -> list[str]:
    columns = ["---" if column < num_left else "---:" for column in range(len(names))]
    lines = [f"| {' | '.join(cells)} |" for cells in (names, *rows)]
    return [lines[0], f"|{'|'.join(columns)}|", *lines[1:]]


def _steps_table(steps: Sequence[Step]) -> list[str]:
    rows = []
    for batch in _BATCHES:
        short, long = (step for step in steps if step.batch == batch)
        cells = [f"{batch}", f"{short.weights_ms:.1f}", f"{short.exchange_ms:.1f}"]
        for step in (short, long):
            rate = batch / step.tpot_ms * 1e3
            cells += [f"{step.kv_ms:.1f}", f"{step.tpot_ms:.1f}", f"{rate:,.0f}"]
        rows.append(cells)
    names = ["batch", "weights", "exchange"]
    for context in ("1k", "4k"):
        names += [f"KV, {context}", f"TPOT, {context}", f"tokens/s, {context}"]
    return _table(names, rows)


def _largest_table(found: Sequence[Largest]) -> list[str]:
    rows = [
        (
            one.group,
            f"{one.context:,}",
            f"{one.step.batch}",
            f"{one.step.tpot_ms:.1f}",
            one.bound,
            f"{one.step.batch / one.step.tpot_ms * 1e3:,.0f}",
            f"{one.tokens_per_s_per_device:,.0f}",
        )
        for one in found
    ]
    names = ("model", "context", "batch", "TPOT, ms", "bound by", "tokens/s", "of one GPU")
    return _table(names, rows, num_left=1)


def _gather_table(found: Sequence[HeadGather]) -> list[str]:
    rows = [
        (
            f"{one.batch}",
            f"{one.logits_us:.1f}",
            f"{one.candidates_us:.1f}",
            f"{one.saved_share:.2%}",
        )
        for one in found
    ]
    names = ("batch", "all logits", f"{NUM_CANDIDATES} of each rank", "saved of the step")
    return _table(names, rows)


def _simulated_table(found: Sequence[Simulated]) -> list[str]:
    rows = [
        (
            f"{one.context:,}",
            f"{one.batch}",
            f"{one.derived_ms:.2f}",
            f"{one.simulated_ms:.2f}",
            f"{one.with_most_slots_ms:.2f}",
        )
        for one in found
    ]
    names = ("context", "batch", "derived", "simulated", f"with {MOST_SLOTS} slots")
    return _table(names, rows)


def run() -> PartResult:
    """Print the tables, as Markdown."""
    found = results()
    for title, lines in tables(found):
        print(f"{title}:\n\n" + "\n".join(lines) + "\n")
    return PartResult(found, file=FILE)

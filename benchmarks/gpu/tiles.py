"""The sweep that the kernels' tables of tile shapes come from: each candidate beside the present
choice, on the shapes of the benchmark.

    python -m benchmarks.gpu.tiles [--only NAME ...] [--save PATH] [--compilers 12]
    python -m benchmarks.gpu.tiles --smoke

Candidates that do not fit the device, or compute something else, are left out. A table is worth
changing where the best is faster by more than the spread of its own runs.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from benchmarks.support.command import command_parser

if TYPE_CHECKING:
    from benchmarks.gpu.scope import Scope
    from benchmarks.gpu.tile_sweeps import Sweep, Tile


class Timed(msgspec.Struct, frozen=True):
    """``rate`` in the sweep's unit; ``failure`` instead of it where a tile cannot be used."""

    tile: str
    rate: float = 0.0
    us: float = 0.0
    spread_us: float = 0.0
    failure: str = ""


class Swept(msgspec.Struct, frozen=True):
    """``others`` are the candidates, the fastest first."""

    name: str
    unit: str
    present: Timed
    others: list[Timed]


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if every present choice computes what it has to."""
    parsed = _parser().parse_args(arguments)
    if parsed.smoke:
        os.environ["TRITON_INTERPRET"] = "1"  # read when triton is loaded, which is later
    from benchmarks.gpu.scope import Scope
    from benchmarks.gpu.tile_sweeps import sweeps

    scope = Scope(
        "tiles",
        smoke=parsed.smoke,
        seed=parsed.seed,
        deadline_s=time.monotonic() + parsed.minutes * 60,
    )
    chosen = [
        sweep
        for sweep in sweeps(scope)
        if not parsed.only or any(name in sweep.name for name in parsed.only)
    ]
    if not parsed.smoke:
        _compile(parsed, chosen)
    done: list[Swept] = []
    for sweep in chosen:
        if scope.left_s < 0:
            print(f"{sweep.name}: the time was over", file=sys.stderr)
            continue
        done.append(_swept(scope, sweep))
        print("\n".join(_lines(done[-1])), flush=True)
        if parsed.save:
            content = msgspec.json.format(msgspec.json.encode(done), indent=1)
            parsed.save.write_bytes(content + b"\n")
    return 1 if any(swept.present.failure for swept in done) else 0


def _swept(scope: Scope, sweep: Sweep) -> Swept:
    present = _timed(scope, sweep, sweep.present)
    others = [_timed(scope, sweep, tile) for tile in sweep.candidates]
    others.sort(key=lambda timed: timed.rate, reverse=True)
    return Swept(sweep.name, sweep.unit, present, others)


def _timed(scope: Scope, sweep: Sweep, tile: Tile) -> Timed:
    from benchmarks.gpu.kernel_cases import check, num_sets, relative_error, timed
    from benchmarks.gpu.scope import describe, is_fatal

    try:
        with sweep.using(tile):
            check(sweep.make(tile, 0), sweep.tolerance, relative_error)
            count = num_sets(scope.device, sweep.bytes_moved)
            timing = timed(scope.device, [sweep.make(tile, i).run for i in range(count)])
    except Exception as error:
        if is_fatal(error):
            raise
        return Timed(str(tuple(tile)), failure=describe(error))
    return Timed(
        str(tuple(tile)),
        sweep.amount / timing.median_s,
        timing.median_s * 1e6,
        timing.spread_s * 1e6,
    )


def _lines(swept: Swept, most: int = 3) -> list[str]:
    def line(label: str, timed: Timed) -> str:
        if timed.failure:
            return f"  {label:8} {timed.tile:28} {timed.failure[:80]}"
        return (
            f"  {label:8} {timed.tile:28} {timed.rate:10.4g} {swept.unit}  "
            f"{timed.us:8.1f} us, spread {timed.spread_us:.1f}"
        )

    working = [timed for timed in swept.others if not timed.failure]
    return [
        f"{swept.name} ({len(swept.others) - len(working)} of {len(swept.others)} left out)",
        line("present", swept.present),
        *(line("" if index else "best", timed) for index, timed in enumerate(working[:most])),
    ]


def _compile(parsed: argparse.Namespace, chosen: list[Sweep]) -> None:
    """Fill the compiler's cache in several processes, so that the sweep itself only measures."""
    tasks = [
        (parsed.seed, sweep.name, index)
        for sweep in chosen
        for index in range(len(sweep.candidates))
    ]
    context = multiprocessing.get_context("spawn")
    with context.Pool(parsed.compilers) as pool:
        for number, _ in enumerate(pool.imap_unordered(_compile_one, tasks, chunksize=8), 1):
            if number % 100 == 0:
                print(f"compiled {number} of {len(tasks)}", file=sys.stderr, flush=True)


def _compile_one(task: tuple[int, str, int]) -> None:
    """Run one candidate once; why one cannot be used is said when it is timed."""
    from benchmarks.gpu.scope import Scope, describe
    from benchmarks.gpu.tile_sweeps import sweeps

    seed, name, index = task
    scope = Scope(
        "tiles",
        smoke=False,
        seed=seed,
        deadline_s=0.0,
    )
    sweep = next(sweep for sweep in sweeps(scope) if sweep.name == name)
    tile = sweep.candidates[index]
    try:
        with sweep.using(tile):
            sweep.make(tile, 0).run()
    except Exception as error:  # noqa: BLE001 (it comes again when the tile is timed)
        print(f"{name} {tuple(tile)}: {describe(error)}", file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("gpu.tiles", __doc__)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="parts of names")
    parser.add_argument("--smoke", action="store_true", help="tiny, on the CPU")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=9.0, help="(default: 9)")
    parser.add_argument("--compilers", type=int, default=12, help="processes (default: 12)")
    parser.add_argument("--save", type=Path, help="write JSON after each sweep")
    return parser


if __name__ == "__main__":
    sys.exit(main())

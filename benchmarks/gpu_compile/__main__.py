"""Compile every kernel for GPUs and print its registers and shared memory.

    python -m benchmarks.gpu_compile [--model NAME ...] [--formats bf16|fp8|fp32 ...] [--json]
    python -m benchmarks.gpu_compile --quantized [LAYOUT ...]
    python -m benchmarks.gpu_compile --adapters [NAME ...]
    python -m benchmarks.gpu_compile --engine

The second form compiles only products with quantized weights, in all or the named layouts; the
third only products of adapters, of all or the named models. Without options both are included. The
last form runs a whole engine of a small model as on a GPU, except for the results of its kernels.
Needs no GPU. Fails if a kernel does not compile, spills registers, exceeds the shared memory, or is
compiled again for another batch length.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import TYPE_CHECKING

from benchmarks.gpu_compile.models import CONFIGS, model_config
from benchmarks.support.command import command_parser

if TYPE_CHECKING:
    from benchmarks.gpu_compile.compiling import Variant

FORMATS = ("bf16", "fp8", "fp32")


def main() -> int:
    parser = command_parser("gpu_compile", __doc__)
    parser.add_argument("--model", choices=CONFIGS, action="append", help="default: all")
    parser.add_argument("--formats", choices=FORMATS, action="append", help="default: all")
    parser.add_argument(
        "--quantized", nargs="*", metavar="LAYOUT", help="quantized weights only; default: all"
    )
    parser.add_argument(
        "--adapters", nargs="*", metavar="NAME", choices=CONFIGS, help="adapters only; default: all"
    )
    parser.add_argument(
        "--engine", action="store_true", help="compile for a whole engine instead of models"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args()
    # Read when a kernel is defined, by the imports below.
    if os.environ.pop("TRITON_INTERPRET", "0") == "1":
        print("TRITON_INTERPRET is ignored: this benchmark compiles kernels.", file=sys.stderr)
    from benchmarks.gpu_compile.adapters import compile_adapters
    from benchmarks.gpu_compile.compiling import Compilation
    from benchmarks.gpu_compile.engine import SETTINGS, compile_engine
    from benchmarks.gpu_compile.quantized import LAYOUTS, compile_quantized
    from benchmarks.gpu_compile.steps import compile_model, never_compiled

    unknown = set(args.quantized or ()) - {layout.name for layout in LAYOUTS}
    if unknown:
        names = ", ".join(repr(layout.name) for layout in LAYOUTS)
        parser.error(f"no layout is called {', '.join(unknown)}; there are {names}")
    compilation = Compilation()
    start = time.perf_counter()
    for name in SETTINGS if args.engine else ():
        compile_engine(compilation, name)
    alone = args.engine or args.quantized is not None or args.adapters is not None
    is_all = args.model is None and not alone
    if args.quantized is not None or is_all:
        compile_quantized(compilation, args.quantized)
    for name in (args.adapters or CONFIGS) if args.adapters is not None or is_all else ():
        for formats in args.formats or FORMATS:
            if formats != "fp8":  # as bf16, but for the cache
                compile_adapters(compilation, name, formats)
    for name in CONFIGS if is_all else args.model or ():
        for formats in args.formats or FORMATS:
            for deterministic in (False, True):
                compile_model(
                    compilation,
                    name,
                    model_config(name),
                    formats=formats,
                    deterministic=deterministic,
                )
    took_s = time.perf_counter() - start
    variants = sorted(compilation.variants.values())
    problems = [
        f"{variant.kernel} ({variant.constants}; {variant.users[0]}): {variant.problem}"
        for variant in variants
        if variant.problem
    ]
    problems += [*compilation.failures, *compilation.specialised()]
    if is_all:
        problems += never_compiled(compilation)
    if args.json:
        found = {"variants": [variant._asdict() for variant in variants], "problems": problems}
        print(json.dumps(found, indent=1))
        return 1 if problems else 0
    _print_table(variants)
    num_kernels = len({variant.kernel for variant in variants})
    print(f"{len(variants)} variants of {num_kernels} kernels in {took_s:.0f} s")
    for problem in problems:
        print(f"PROBLEM {problem}")
    return 1 if problems else 0


def _print_table(variants: list[Variant]) -> None:
    print(f"{'kernel':24} {'registers':>9} {'spilled':>7} {'shared':>7} wgmma  variant; first user")
    for variant in variants:
        wgmma = "yes" if variant.has_wgmma else "-"
        more = f" +{len(variant.users) - 1}" if len(variant.users) > 1 else ""
        print(
            f"{variant.kernel.removesuffix('_kernel'):24} {variant.registers:9} "
            f"{variant.spilled_bytes:7} {variant.shared_bytes:7} {wgmma:5}  {variant.constants}; "
            f"{variant.users[0]}{more}"
        )


if __name__ == "__main__":
    sys.exit(main())

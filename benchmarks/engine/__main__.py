"""Millrace's engine on the CPU, part by part.

  python -m benchmarks.engine [--only PART ...]

ceilings  the machine's bounds: memory read, GEMM rate, a decode step's linear maps alone
step      milliseconds of a step by batch size, and of a prefill
planning  Python's part of a step at 32 and 256 sequences
sampling  milliseconds to choose a batch's next tokens, by option
batching  continuous beside static batching
memory    sequences that fit in the same memory, with a paged and a contiguous cache
chunking  gaps in running streams while an 8k prompt enters
grammars  wait of a new grammar behind another tenant's slow grammars
threads   gain of binding the engine's threads to cores
"""

import sys

from benchmarks.support.command import run_parts

PARTS = {
    "ceilings": "ceilings:run",
    "step": "step:run",
    "planning": "planning:run",
    "sampling": "sampling:run",
    "batching": "batching:batching",
    "memory": "batching:memory",
    "chunking": "batching:chunking",
    "grammars": "grammars:run",
    "threads": "threads:run",
}

if __name__ == "__main__":
    sys.exit(run_parts(__package__ or "", __doc__, PARTS))

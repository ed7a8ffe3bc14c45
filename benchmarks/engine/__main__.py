"""Millrace's engine on the CPU, part by part.

  python -m benchmarks.engine [--only PART ...]

ceilings  what bounds an engine here: memory read, GEMM rate, a decode step's linear maps alone
step      milliseconds of a step by batch size, and of a prefill
planning  Python's part of a step at 32 and 256 sequences
sampling  milliseconds to choose a batch's next tokens, by option
batching  continuous beside static batching
memory    a paged beside a contiguous cache: sequences that run together in the same memory
chunking  the gaps in running streams while an 8k prompt enters
grammars  how long a new grammar waits behind another tenant's slow ones
threads   what binding the engine's threads to cores is worth
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

"""A model over several ranks or stages.

  python -m benchmarks.parallel [--only PART ...]

ranks  a 100M Llama on one rank, two ranks and two stages, each with one thread
steps  no measurement: the step of a 70B and a 405B model over several H200, by formulas
"""

import sys

from benchmarks.support.command import run_parts

PARTS = {
    "ranks": "ranks:run",
    "steps": "steps:run",
}

if __name__ == "__main__":
    sys.exit(run_parts(__package__ or "", __doc__, PARTS))

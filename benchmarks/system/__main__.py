"""Benchmarks of the whole ``millrace up`` on this machine.

  python -m benchmarks.system [--only PART ...]

walk        the demo model through the whole path, beside the engine alone
start       seconds from process start to the first token of the demo model
idle        CPU time, wake-ups and memory of an idle system, by process
token_path  CPU time and context switches per token in each process on its way
"""

import sys

from benchmarks.support.command import run_parts

PARTS = {
    "walk": "walk:run",
    "start": "start:run",
    "idle": "idle:run",
    "token_path": "token_path:run",
}

if __name__ == "__main__":
    sys.exit(run_parts(__package__ or "", __doc__, PARTS))

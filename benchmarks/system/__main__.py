"""Benchmarks of the whole ``millrace up`` on this machine.

  python -m benchmarks.system [--only PART ...]

walk        the demo model through the whole path, beside the engine alone
start       seconds from the start of a process to the first token of the demo model
idle        what a system takes that has no requests, process by process
token_path  CPU time and switches that a token costs each process on its way
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

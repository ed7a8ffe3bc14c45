"""KV cache: hits, reloads, pulls from other workers, and moves.

  python -m benchmarks.kv [--only PART ...]

prefix  throughput by hit rate beside no cache, and TTFT of cached prompts
host    reload of blocks from host memory, beside a plain copy
disk    reload of blocks from disk after a restart; with --stores also from an object store
pull    pull of another worker's blocks, by mapped memory, by TCP and by NIXL
drain   gaps in streams when their worker drains
roles   streams beside long prompts, with and without prefill workers
"""

import sys

from benchmarks.support.command import run_parts

PARTS = {
    "prefix": "prefix:run",
    "host": "host:run",
    "disk": "disk:run",
    "pull": "pull:run",
    "drain": "moves:drain",
    "roles": "moves:roles",
}

if __name__ == "__main__":
    sys.exit(run_parts(__package__ or "", __doc__, PARTS))

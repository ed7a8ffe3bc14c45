"""KV cache: hits, reloads, pulls from other workers, and moves.

  python -m benchmarks.kv [--only PART ...]

prefix  throughput by hit rate beside no cache, and TTFT of what is cached
host    bringing blocks back from host memory, beside a plain copy
disk    bringing them back from disk after a restart; with --stores from an object store, too
pull    having blocks of another worker, by mapped memory, by TCP and by NIXL
drain   how long streams stand still when their worker drains
roles   streams beside long prompts, with workers for prompts apart and without
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

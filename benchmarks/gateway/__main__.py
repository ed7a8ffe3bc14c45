"""The gateway, with workers that compute nothing.

  python -m benchmarks.gateway [--only PART ...]

relay    what a token costs from nats-server to 200 clients, by WebSocket and by SSE
sockets  10,000 WebSocket streams on one process: token latency, memory of an idle connection
latency  what the gateway adds to the first token of requests that arrive at random
prompts  what prompts that are refused for their length cost everyone else
tracing  what tracing costs by request and by token
soak     no figure: clients who leave, stall and break off at random leave nothing behind
"""

import sys

from benchmarks.support.command import run_parts

PARTS = {
    "relay": "relay:run",
    "sockets": "sockets:run",
    "latency": "latency:run",
    "prompts": "prompts:run",
    "tracing": "tracing:run",
    "soak": "soak:run",
}

if __name__ == "__main__":
    sys.exit(run_parts(__package__ or "", __doc__, PARTS))

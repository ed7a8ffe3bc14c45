"""The gateway, with workers that compute nothing.

  python -m benchmarks.gateway [--only PART ...]

relay    cost of a token from nats-server to 200 clients, by WebSocket and by SSE
sockets  10,000 WebSocket streams on one process: token latency, memory of an idle connection
latency  time that the gateway adds to the first token of requests that arrive at random
prompts  cost of prompts refused for their length, for other requests
tracing  cost of tracing per request and per token
soak     check that clients that leave, stall and disconnect at random leak nothing
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

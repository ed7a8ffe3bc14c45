"""Schedulers, the job queue and workers on real servers, with engines that compute nothing.

  python -m benchmarks.scheduler [--only PART ...]

queue       publish to pull and the relay of frames beside bare nats-py; cost of many tenant queues
dispatch    publish to worker receipt through the scheduler, and its rate with a backlog
neighbours  shares of backlogged tenants beside VTC's bound, the TTFT of quiet tenants
replicas    shares by two schedulers and two publishers while a scheduler is killed
backlog     the first job behind another tenant's 100,000
lines       endings of 3,000 jobs that a tenant's service publishes at once, with the demo model
preemption  the first token of enterprise requests on a worker that is full of free streams
prediction  the predicted first token beside the actual one, in virtual time
affinity    routing by prefix cache beside routing by load
cancel      time from a published cancel until the request's blocks are free
"""

import sys

from benchmarks.support.command import run_parts

PARTS = {
    "queue": "queue:run",
    "dispatch": "dispatch:run",
    "neighbours": "fairness:neighbours",
    "replicas": "fairness:replicas",
    "backlog": "fairness:backlog",
    "lines": "lines:run",
    "preemption": "preemption:run",
    "prediction": "prediction:run",
    "affinity": "affinity:run",
    "cancel": "cancel:run",
}

if __name__ == "__main__":
    sys.exit(run_parts(__package__ or "", __doc__, PARTS))

"""Path of a record from the outbox over Kafka to ClickHouse, and its queries.

  python -m benchmarks.telemetry [--only PART ...]

sink       rows per second of one core from Kafka into the embedded ClickHouse engine
outage     how long until the lag is gone after ClickHouse took nothing for five minutes
endpoint   whether the ClickHouse endpoint keeps its bounds under twelve clients
chaos      no figure: every record is counted once after kill -9 of telemetry and of Kafka
cost       the share of a worker's CPU that its records take
analytics  how long every saved query takes over 1,000,000 requests
fill       no figure: it makes those requests, in the folder --path
"""

import sys

from benchmarks.support.command import run_parts

PARTS = {
    "sink": "sink:run",
    "outage": "outage:run",
    "endpoint": "endpoint:run",
    "chaos": "chaos:run",
    "cost": "cost:run",
    "analytics": "analytics:run",
    "fill": "fill:run",
}

if __name__ == "__main__":
    sys.exit(run_parts(__package__ or "", __doc__, PARTS))

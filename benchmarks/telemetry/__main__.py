"""Path of a record from the outbox over Kafka to ClickHouse, and its queries.

  python -m benchmarks.telemetry [--only PART ...]

sink       rows per second of one core from Kafka into the embedded ClickHouse engine
outage     catch-up time after five minutes without ClickHouse
endpoint   check of the ClickHouse endpoint's bounds under twelve clients
chaos      check that every record counts once after kill -9 of telemetry and of Kafka
cost       share of a worker's CPU for its records
analytics  time of every saved query over 1,000,000 requests
fill       no measurement: makes those requests, in the folder --path
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

"""An analyst's steps with DuckDB over tables of Arrow."""

from __future__ import annotations

import json
import sys
from typing import Any

import clickhouse_connect
import duckdb

client = clickhouse_connect.get_client(dsn=sys.argv[1], database="millrace")
requests = client.query_arrow("SELECT * FROM requests_once")
deliveries = client.query_arrow("SELECT request_id, first_byte_ms FROM deliveries_once")
db = duckdb.connect()
db.register("requests", requests)
db.register("deliveries", deliveries)


def rows(sql: str, *parameters: str) -> list[Any]:
    return list(db.execute(sql, parameters).fetchall())


hours = rows(
    "SELECT date_trunc('hour', done_at AT TIME ZONE 'UTC') AS hour, count(*) FROM requests "
    "GROUP BY hour ORDER BY hour"
)
joined = rows(
    "SELECT tenant, count(*) FROM requests JOIN deliveries USING (request_id) "
    "GROUP BY tenant ORDER BY tenant"
)
sys.stdout.write(
    json.dumps(
        {
            "databases": client.query_arrow("SHOW DATABASES")["name"].to_pylist(),
            "tables": client.query_arrow("SHOW TABLES")["name"].to_pylist(),
            "columns": [row[0] for row in rows("DESCRIBE requests")],
            "hours": [[hour.isoformat(), n] for hour, n in hours],
            "joined": joined,
            "of_acme": rows("SELECT count(*) FROM requests WHERE tenant = ?", "acme")[0][0],
            "wide": requests.shape,
        }
    )
)

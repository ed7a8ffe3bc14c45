"""An analyst's steps with clickhouse-connect and pandas."""

from __future__ import annotations

import json
import sys

import clickhouse_connect

client = clickhouse_connect.get_client(dsn=sys.argv[1], database="millrace")
hours = client.query_df(
    "SELECT toStartOfHour(done_at) AS hour, count() AS n FROM requests_once "
    "GROUP BY hour ORDER BY hour"
)
joined = client.query_df(
    "SELECT tenant, count() AS n FROM requests_once JOIN deliveries_once USING request_id "
    "GROUP BY tenant ORDER BY tenant"
)
of_tenant = "SELECT count() AS n FROM requests_once WHERE tenant = {tenant:String}"
sys.stdout.write(
    json.dumps(
        {
            "databases": client.query_df("SHOW DATABASES")["name"].to_list(),
            "tables": client.query_df("SHOW TABLES")["name"].to_list(),
            "columns": client.query_df("DESCRIBE TABLE requests_once")["name"].to_list(),
            "hours": [[row.hour.isoformat(), int(row.n)] for row in hours.itertuples()],
            "joined": [[row.tenant, int(row.n)] for row in joined.itertuples()],
            "of_acme": int(client.query_df(of_tenant, parameters={"tenant": "acme"})["n"][0]),
            "wide": client.query_df("SELECT * FROM requests_once").shape,
        }
    )
)

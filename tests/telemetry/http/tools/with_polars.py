"""An analyst's steps with polars, over streams of Arrow."""

from __future__ import annotations

import base64
import http.client
import json
import sys
from typing import Any
from urllib.parse import quote, urlsplit

import polars

URL = urlsplit(sys.argv[1])
# ClickHouse's Arrow has DateTime as a number of seconds, and DateTime64 as a time.
ARGUMENTS = "database=millrace&enable_extended_results_for_datetime_functions=1"


def frame(sql: str, **parameters: str) -> Any:
    given = "".join(f"&param_{name}={quote(value)}" for name, value in parameters.items())
    credentials = base64.b64encode(f"{URL.username}:{URL.password}".encode()).decode()
    connection = http.client.HTTPConnection(str(URL.hostname), URL.port)
    connection.request(
        "POST",
        f"/?{ARGUMENTS}{given}",
        f"{sql} FORMAT ArrowStream",
        {"Authorization": f"Basic {credentials}"},
    )
    answer = connection.getresponse()
    assert answer.status == 200, answer.read()
    return polars.read_ipc_stream(answer.read())


hours = frame(
    "SELECT toStartOfHour(done_at) AS hour, count() AS n FROM requests_once "
    "GROUP BY hour ORDER BY hour"
)
joined = frame(
    "SELECT tenant, count() AS n FROM requests_once JOIN deliveries_once USING request_id "
    "GROUP BY tenant ORDER BY tenant"
)
wide = frame("SELECT * FROM requests_once")
of_tenant = "SELECT count() AS n FROM requests_once WHERE tenant = {tenant:String}"
assert wide["done_at"].dtype == polars.Datetime("us", "UTC"), wide["done_at"].dtype
sys.stdout.write(
    json.dumps(
        {
            "databases": frame("SHOW DATABASES")["name"].to_list(),
            "tables": frame("SHOW TABLES")["name"].to_list(),
            "columns": wide.columns,
            "hours": [[hour.replace(tzinfo=None).isoformat(), n] for hour, n in hours.rows()],
            "joined": joined.rows(),
            "of_acme": frame(of_tenant, tenant="acme")["n"][0],
            "wide": wide.shape,
        }
    )
)

"""The questions of Superset's engine spec for ClickHouse: names, columns, all time grains."""

from __future__ import annotations

import contextlib
import datetime
import json
import sys
from typing import Any
from urllib.parse import urlsplit

import sqlalchemy as sa
from superset.app import create_app
from superset.sql.parse import Table

URL = urlsplit(sys.argv[1])
with contextlib.redirect_stdout(sys.stderr):
    app = create_app()


def asked() -> dict[str, Any]:
    from superset.db_engine_specs.clickhouse import ClickHouseConnectEngineSpec as Spec
    from superset.models.core import Database

    uri = f"clickhousedb+connect{sys.argv[1].removeprefix('http')}/millrace"
    place = {"host": URL.hostname, "port": URL.port}
    assert Spec.validate_parameters({"parameters": place}) == []
    database = Database(database_name="millrace", sqlalchemy_uri=uri)
    inspector = sa.inspect(sa.create_engine(uri))
    since = Spec.convert_dttm("DateTime", datetime.datetime(2026, 1, 1))  # noqa: DTZ001

    def grouped(expression: str) -> Any:
        return database.get_df(
            f"SELECT {expression.replace('{col}', 'done_at')} AS t, count() AS n "
            f"FROM millrace.requests_once WHERE done_at > {since} GROUP BY t ORDER BY t"
        )

    grains = {name: each for name, each in Spec._time_grain_expressions.items() if name}
    for expression in grains.values():
        assert grouped(expression)["n"].sum() == 6, expression
    joined = database.get_df(
        "SELECT tenant, count() AS n FROM requests_once JOIN deliveries_once USING request_id "
        "GROUP BY tenant ORDER BY tenant"
    )
    assert "count" in Spec.get_function_names(database)
    of_acme = database.get_df("SELECT count() AS n FROM requests_once WHERE tenant IN ('acme')")
    table = Table("requests_once", "millrace")
    return {
        "databases": sorted(Spec.get_schema_names(inspector)),
        "tables": sorted(Spec.get_table_names(database, inspector, "millrace")),
        "columns": [column["column_name"] for column in Spec.get_columns(inspector, table)],
        "hours": [[row.t.isoformat(), row.n] for row in grouped(grains["PT1H"]).itertuples()],
        "joined": joined.to_numpy().tolist(),
        "of_acme": int(of_acme["n"][0]),
        "wide": database.get_df("SELECT * FROM millrace.requests_once").shape,
    }


with app.app_context(), contextlib.redirect_stdout(sys.stderr):
    answers = asked()
sys.stdout.write(json.dumps(answers))

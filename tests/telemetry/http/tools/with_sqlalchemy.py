"""An analyst's steps with clickhouse-sqlalchemy, which reads answers in TabSeparated."""

from __future__ import annotations

import json
import sys
import warnings

import sqlalchemy as sa

# Nested columns have types that it does not know.
warnings.simplefilter("ignore")
engine = sa.create_engine(f"clickhouse+{sys.argv[1]}/millrace")
inspector = sa.inspect(engine)
requests = sa.Table("requests_once", sa.MetaData(), autoload_with=engine)
# It reads DateTime with a time zone as text, and DateTime64 as a time.
hour = sa.func.toDateTime64(sa.func.toStartOfHour(requests.c.done_at), 0).label("hour")
with engine.connect() as connection:
    hours = connection.execute(
        sa.select(hour, sa.func.count().label("n")).group_by(hour).order_by(hour)
    ).fetchall()
    joined = connection.execute(
        sa.text(
            "SELECT tenant, count() AS n FROM requests_once JOIN deliveries_once USING request_id "
            "GROUP BY tenant ORDER BY tenant"
        )
    ).fetchall()
    of_acme = connection.execute(
        sa.text("SELECT count() AS n FROM requests_once WHERE tenant = :tenant"),
        {"tenant": "acme"},
    ).scalar()
    wide = connection.execute(sa.select(requests)).fetchall()
    latest = connection.execute(sa.text("SELECT max(done_at) AS t FROM requests_once")).scalar()
    assert latest.second == 5, latest
sys.stdout.write(
    json.dumps(
        {
            "databases": inspector.get_schema_names(),
            "tables": inspector.get_table_names() + inspector.get_view_names(),
            "columns": [column["name"] for column in inspector.get_columns("requests_once")],
            "hours": [[row.hour.isoformat(), row.n] for row in hours],
            "joined": [list(row) for row in joined],
            "of_acme": of_acme,
            "wide": [len(wide), len(wide[0])],
        }
    )
)

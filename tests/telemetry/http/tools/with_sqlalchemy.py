"""What an analyst does with clickhouse-sqlalchemy, which reads answers in TabSeparated."""

from __future__ import annotations

import json
import sys
import warnings

import sqlalchemy as sa

# Nested columns have types that it does not know.
warnings.simplefilter("ignore")
engine = sa.create_engine(f"clickhouse+{sys.argv[1]}/millrace")
inspector = sa.inspect(engine)
meta = sa.MetaData()
requests = sa.Table("requests_once", meta, autoload_with=engine)
deliveries = sa.Table("deliveries_once", meta, autoload_with=engine)
hour = sa.func.toStartOfHour(requests.c.done_at).label("hour")
with engine.connect() as connection:
    hours = connection.execute(
        sa.select(hour, sa.func.count().label("n")).group_by(hour).order_by(hour)
    ).fetchall()
    joined = connection.execute(
        sa.select(requests.c.tenant, sa.func.count().label("n"))
        .select_from(requests.join(deliveries, requests.c.request_id == deliveries.c.request_id))
        .group_by(requests.c.tenant)
        .order_by(requests.c.tenant)
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
            "tables": inspector.get_table_names(),
            "columns": [column["name"] for column in inspector.get_columns("requests_once")],
            "hours": [[row.hour.isoformat(), row.n] for row in hours],
            "joined": [list(row) for row in joined],
            "of_acme": of_acme,
            "wide": [len(wide), len(wide[0])],
        }
    )
)

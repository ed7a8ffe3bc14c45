"""An analyst's steps with ibis: expressions, tables of the own memory, and a view."""

from __future__ import annotations

import json
import sys

import ibis

con = ibis.connect(f"clickhouse{sys.argv[1].removeprefix('http')}/millrace")
requests, deliveries = con.table("requests_once"), con.table("deliveries_once")
by_hour = requests.group_by(hour=requests.done_at.truncate("h"))
hours = by_hour.agg(n=requests.count()).order_by("hour").to_pandas()
joined = requests.join(deliveries, "request_id").group_by("tenant").agg(n=ibis._.count())
tenant = ibis.param("string")
of_tenant = requests.filter(requests.tenant == tenant).count()

teams = ibis.memtable({"tenant": ["acme", "globex"], "team": ["search", "maps"]})
by_team = requests.join(teams, "tenant").group_by("team").agg(n=ibis._.count())
assert by_team.order_by("team").to_pandas().to_numpy().tolist() == [["maps", 2], ["search", 4]]
many = ibis.memtable({"number": range(200_000)})
assert con.execute(many.number.sum()) == 19_999_900_000

times = requests.select("done_at").to_pyarrow()
assert str(times.schema.field("done_at").type) == "timestamp[us, tz=UTC]"
per_tenant = requests.group_by("tenant").agg(n=ibis._.count())
con.create_view("per_tenant", per_tenant, database="analysts", overwrite=True)
assert con.list_tables(database="analysts") == ["per_tenant"]
assert con.table("per_tenant", database="analysts").n.sum().execute() == 6
con.raw_sql("DROP VIEW analysts.per_tenant")
sys.stdout.write(
    json.dumps(
        {
            "databases": con.list_databases(),
            "tables": con.list_tables(),
            "columns": list(requests.columns),
            "hours": [[row.hour.isoformat(), int(row.n)] for row in hours.itertuples()],
            "joined": joined.order_by("tenant").to_pandas().to_numpy().tolist(),
            "of_acme": int(con.execute(of_tenant, params={tenant: "acme"})),
            "wide": requests.to_pandas().shape,
        }
    )
)

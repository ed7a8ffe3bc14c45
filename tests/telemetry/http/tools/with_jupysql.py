"""An analyst's steps in a notebook with JupySQL."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from typing import Any

from IPython.core.interactiveshell import InteractiveShell

shell = InteractiveShell.instance()


def frame(sql: str) -> Any:
    return shell.run_cell_magic("sql", "", sql).DataFrame()


with contextlib.redirect_stdout(io.StringIO()):
    shell.run_line_magic("load_ext", "sql")
    shell.run_line_magic("sql", f"clickhousedb{sys.argv[1].removeprefix('http')}/millrace")
    shell.user_ns["tenant"] = "acme"
    tables = str(shell.run_line_magic("sqlcmd", "tables"))
    columns = str(shell.run_line_magic("sqlcmd", "columns --table requests_once"))
    hours = frame(
        "SELECT toStartOfHour(done_at) AS hour, count() AS n FROM requests_once "
        "GROUP BY hour ORDER BY hour"
    )
    joined = frame(
        "SELECT tenant, count() AS n FROM requests_once JOIN deliveries_once USING request_id "
        "GROUP BY tenant ORDER BY tenant"
    )
    of_acme = frame("SELECT count() AS n FROM requests_once WHERE tenant = '{{tenant}}'")
    wide = frame("SELECT * FROM requests_once")
    databases = frame("SELECT name FROM system.databases")
sys.stdout.write(
    json.dumps(
        {
            "databases": databases["name"].to_list(),
            "tables": [row.strip("| ") for row in tables.splitlines() if row.startswith("|")],
            "columns": [
                row.split("|")[1].strip() for row in columns.splitlines() if row.startswith("|")
            ][1:],
            "hours": [[row.hour.isoformat(), int(row.n)] for row in hours.itertuples()],
            "joined": joined.to_numpy().tolist(),
            "of_acme": int(of_acme["n"][0]),
            "wide": wide.shape,
        }
    )
)

"""ClickHouse, as a server or embedded: tables, migrations, queries."""

"""ClickHouse user of the boards in docker compose: its rights in ClickHouse's own engine."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

from tests.support.repository import ROOT
from tests.telemetry.reaching_out import REACHING_OUT

_READER = ROOT / "deploy" / "clickhouse" / "reader.xml"
# An engine has one user, and a process one engine: here it is the reader.
_ASK = """
import json, sys, urllib.parse
import chdb
from tests.telemetry.reaching_out import REACHING_OUT
store, config, port = sys.argv[1:]
options = urllib.parse.urlencode({"config-file": config})
connection = chdb.connect(f"{store}?{options}")
def ask(sql):
    try:
        connection.query(sql.replace("{port}", port), "TSV")
    except Exception as error:
        return str(error)
    return "done"
print(json.dumps({sql: ask(sql) for sql in json.load(sys.stdin)}))
"""
_SOURCES = tuple(
    f"{verb} {name}('"
    for verb in ("SELECT * FROM", "DESCRIBE TABLE")
    for name in ("file", "url", "s3", "remote", "mysql", "postgresql", "hdfs")
)


def test_the_reader_reaches_nothing_but_its_tables(tmp_path: Path) -> None:
    users = ET.parse(_READER).getroot()
    reader = users.find("users/reader")
    password = users.find("users/reader/password")
    assert reader is not None
    assert password is not None
    assert password.attrib == {"from_env": "CLICKHOUSE_READER_PASSWORD"}
    password.attrib.clear()
    reader.tag = "default"
    profiles = users.find("profiles")
    assert profiles is not None
    # A server has these in its own users.xml.
    ET.SubElement(profiles, "default")
    ET.SubElement(users, "quotas").append(ET.Element("default"))
    ET.ElementTree(users).write(tmp_path / "users.xml")
    (tmp_path / "config.xml").write_text(
        "<clickhouse><user_directories><users_xml><path>users.xml</path></users_xml>"
        "</user_directories></clickhouse>"
    )
    sources = [sql for sql in REACHING_OUT if sql.startswith(_SOURCES)]
    changes = ["CREATE DATABASE x", "SET allow_ddl = 1", "SET readonly = 0"]
    limits = ["SET max_execution_time = 5", "SELECT 1"]
    ended = subprocess.run(
        [sys.executable, "-c", _ASK, tmp_path / "store", tmp_path / "config.xml", "1"],
        input=json.dumps([*sources, *changes, *limits]),
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    rows = json.loads(ended.stdout)
    assert len(sources) > 15
    for sql in sources:
        assert "ACCESS_DENIED" in rows[sql], sql
    for sql in changes:
        refused = ("READONLY", "ACCESS_DENIED", "QUERY_IS_PROHIBITED", "SETTING_CONSTRAINT")
        assert any(code in rows[sql] for code in refused), (sql, rows[sql])
    assert [rows[sql] for sql in limits] == ["done", "done"]

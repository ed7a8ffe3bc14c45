"""Message of ``millrace up`` when everything runs."""

from __future__ import annotations

import shlex

from millrace.cli.arguments import shown_path
from millrace.cli.endpoints import Endpoints, without_user
from millrace.cli.local.private_files import CLICKHOUSE_ENV_FILE, NATS_ENV_FILE
from millrace.cli.local.scrape_targets import FILE_NAME
from millrace.cli.local.stack import Plan
from millrace.gateway.tenancy.identity import demands_keys
from millrace.telemetry.kafka.apache.jars import VERSION


def greeting(endpoints: Endpoints, plan: Plan, without_records: str = "") -> str:
    """Return the message for the user: all addresses, and a first request to try.

    ``without_records`` is the reason why telemetry is not up yet.
    """
    question = '"messages":[{"role":"user","content":"What is TTFT?"}]'
    body = f'{{"model":"{plan.models[0]}","stream":true,{question}}}'
    keys, header = "", ""
    if demands_keys(plan.config.gateway):
        data = shlex.quote(shown_path(plan.data))
        keys = (
            "\n  API keys     are demanded. Make one, with --admin for the operations page:\n"
            f"               millrace keys create --tenant NAME --data {data}\n"
        )
        header = " -H 'Authorization: Bearer mr-…'"
    late = f"\n  {without_records}\n" if without_records else ""
    records = _records(endpoints, plan)
    return f"""
Millrace is ready.

  chat page    {endpoints.http}/
  operations   {endpoints.http}/ops
  OpenAI API   {endpoints.http}/v1
  metrics      {shown_path(plan.data / "run" / FILE_NAME)} says where, to Prometheus too
  services     NATS at {without_user(endpoints.nats)}
               (user and password: {shown_path(plan.data / "run" / NATS_ENV_FILE)})
  analytics    ClickHouse at {without_user(endpoints.clickhouse)}
               (user and password: {shown_path(plan.data / "run" / CLICKHOUSE_ENV_FILE)})
               its tables: {endpoints.http}/ops/tables.html
{records}{late}{keys}
  curl -N {endpoints.http}/v1/chat/completions -H 'Content-Type: application/json'{header} \\
    -d '{body}'

Ctrl-C stops everything.
"""


def _records(endpoints: Endpoints, plan: Plan) -> str:
    """Return the lines about the address of the records and the clients that can consume them."""
    if not endpoints.kafka:
        return ""
    if plan.kafka is not None:
        kind = f"Apache Kafka {VERSION} at {endpoints.kafka}"
        more = f"kept in {shown_path(plan.data / 'kafka')}; its topics: docs/kafka.md"
    else:
        kind = f"a stand-in for Kafka at {endpoints.kafka}, in memory"
        more = (
            "for clients of librdkafka and aiokafka only. Java's, Kafka's tools, offsets by\n"
            "               time, lists of groups: millrace up --kafka apache (docs/kafka.md)"
        )
    return f"""  records      {kind}
               {more}
"""

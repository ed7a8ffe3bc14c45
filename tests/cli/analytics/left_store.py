"""Commands on a store that a system left, in a process of their own: an embedded engine keeps the
folder that it has opened until its process ends."""

from __future__ import annotations

import asyncio
import contextlib
import io
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from millrace.cli.main import main
from millrace.runtime.clock import SystemClock
from millrace.schemas.config import ClickHouseConfig
from millrace.schemas.records import RefusalRecord, RequestRecord
from millrace.telemetry.rollups.rollups import Rollups
from millrace.telemetry.store.migrate import migrate
from millrace.telemetry.store.store import Store
from millrace.telemetry.store.tables import REFUSALS, REQUESTS

_ROOT = Path(__file__).parents[3]


class Ran(NamedTuple):
    """Exit code and output of a command."""

    code: int
    out: str
    err: str


class Work(msgspec.Struct, frozen=True):
    """Records to store first, and the commands to run then."""

    data: str
    records: tuple[RequestRecord, ...]
    commands: tuple[tuple[str, ...], ...]
    refusals: tuple[RefusalRecord, ...] = ()


def run_on_store(
    data: Path,
    records: Sequence[RequestRecord],
    commands: Sequence[Sequence[str]],
    refusals: Sequence[RefusalRecord] = (),
) -> list[Ran]:
    """Store the records on ``data`` and run the commands there, one after the other."""
    work = Work(str(data), tuple(records), tuple(map(tuple, commands)), tuple(refusals))
    ended = subprocess.run(
        [sys.executable, "-m", "tests.cli.analytics.left_store"],
        input=msgspec.json.encode(work),
        capture_output=True,
        check=False,
        cwd=_ROOT,
    )
    assert ended.returncode == 0, ended.stderr.decode()
    return msgspec.json.decode(ended.stdout, type=list[Ran])


async def _fill(work: Work) -> None:
    store = await Store.open(ClickHouseConfig(path=str(Path(work.data) / "clickhouse")))
    await migrate(store)
    # Twice, as they come after a crash.
    for token in ("once", "again"):
        columns = REQUESTS.to_columns(work.records, range(len(work.records)))
        await store.insert(REQUESTS, columns, token)
        if work.refusals:
            columns = REFUSALS.to_columns(work.refusals, range(len(work.refusals)))
            await store.insert(REFUSALS, columns, token)
    rollups = Rollups(store, SystemClock(), 1.0)
    rollups.touched(record.done_ns for record in work.records)
    await rollups.settle()
    await store.close()


def _run(command: Sequence[str], data: str) -> Ran:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main([*command, "--data", data])
        except SystemExit as ended:
            code = int(ended.code or 0)
    return Ran(code, out.getvalue(), err.getvalue())


def _serve() -> None:
    work = msgspec.json.decode(sys.stdin.buffer.read(), type=Work)
    if work.records:
        asyncio.run(_fill(work))
    ran = [_run(command, work.data) for command in work.commands]
    sys.stdout.buffer.write(msgspec.json.encode(ran))


if __name__ == "__main__":
    _serve()

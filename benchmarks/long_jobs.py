"""``python -m benchmarks.long_jobs``: what a long job keeps a scheduler from.

Jobs of so much text are read from their JSON and prepared, one after the other, as the scheduler
does it, while a task beats every millisecond: its longest gap is what others wait. Reading alone is
printed beside it, since the loop cannot give way within that.
"""

from __future__ import annotations

import asyncio
import contextlib
import time

import uvloop

from benchmarks.support.command import command_parser
from millrace.bus import codec
from millrace.bus.jobs.decoding import read_job
from millrace.registry.catalogue import load_catalogue
from millrace.registry.served import ServedModel
from millrace.scheduler.jobs.model_cache import ModelCache
from millrace.schemas.errors import MillraceError
from millrace.schemas.jobs import ChatMessage, Job
from millrace.schemas.tenants import LOCAL_TENANT

_MODEL = "demo"
_SENTENCE = "what is a lease and who holds it? "
_BEAT_S = 0.001
_GOAL_MS = 20.0


def main() -> int:
    """0 always: a figure decides nothing."""
    parser = command_parser("long_jobs", __doc__)
    parser.add_argument("--jobs", type=int, default=9)
    parser.add_argument("--mb", type=float, default=7.0, help="of text in each")
    given = parser.parse_args()
    text = (_SENTENCE * int(given.mb * 1e6 / len(_SENTENCE) + 1))[: int(given.mb * 1e6)]
    job = Job(
        request_id="long",
        tenant=LOCAL_TENANT,
        model=_MODEL,
        messages=(ChatMessage("user", text),),
    )
    reading_ms, gap_ms = uvloop.run(_measure(codec.encode_json(job), given.jobs))
    print(f"{given.jobs} jobs of {given.mb:g} MB: read in {reading_ms:.1f} ms at worst, others")
    print(f"waited {gap_ms:.1f} ms at worst (goal: at most {_GOAL_MS:g} ms)")
    return 0


async def _measure(payload: bytes, num_jobs: int) -> tuple[float, float]:
    """The longest reading of a job and the longest gap between beats, ms."""
    catalogue = load_catalogue("")
    model_cache = ModelCache(lambda name: ServedModel.load(catalogue, name))
    await model_cache.warm(_MODEL)
    gaps_s: list[float] = []
    beating = asyncio.create_task(_beat(gaps_s))
    reading_s = 0.0
    for _ in range(num_jobs):
        begun_s = time.perf_counter()
        job = read_job(f"jobs.{_MODEL}.free.{LOCAL_TENANT}", payload, codec.JSON, 1)
        reading_s = max(reading_s, time.perf_counter() - begun_s)
        with contextlib.suppress(MillraceError):  # it may be too long for the model's window
            await model_cache.prepare(job)
    beating.cancel()
    await asyncio.gather(beating, return_exceptions=True)
    model_cache.close()
    return reading_s * 1e3, max(gaps_s) * 1e3


async def _beat(gaps_s: list[float]) -> None:
    last_s = time.perf_counter()
    while True:
        await asyncio.sleep(_BEAT_S)
        now_s = time.perf_counter()
        gaps_s.append(now_s - last_s - _BEAT_S)
        last_s = now_s


if __name__ == "__main__":
    raise SystemExit(main())

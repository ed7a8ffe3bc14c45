"""Rows of requests that have several generations, made of their generations' rows.

They are made anew, whole, whenever one of the generations has been stored, so that records may come
in any order, twice, and hours apart. What a crash leaves out is made when its records come again.
"""

from __future__ import annotations

from collections.abc import Iterable
from string import Template

from millrace.telemetry.store.store import Store
from millrace.telemetry.store.tables import MERGED_COLUMNS

# A server takes parameters in the address of its HTTP interface, which may have a million bytes.
_IDS = 1_000
_NS_PER_S = 1_000_000_000
_MERGE = Template("""
INSERT INTO requests ($names)
SELECT $values
FROM (SELECT * FROM generation_rows FINAL WHERE request_id IN {ids:Array(String)})
GROUP BY request_id
""").substitute(names=", ".join(MERGED_COLUMNS), values=", ".join(MERGED_COLUMNS.values()))
# The row of a request was, now or before, in the minutes in which its generations ended. Its key
# has the minute of the first receipt: it was another one if the generation that was received first
# has been stored after others.
_TOUCHED = """
SELECT groupUniqArrayArray(ended), groupArrayIf(request_id, received > 1)
FROM
(
    SELECT
        request_id,
        groupUniqArray(toUnixTimestamp(toStartOfMinute(done_at))) AS ended,
        uniqExact(toStartOfMinute(received_at)) AS received
    FROM generation_rows
    WHERE request_id IN {ids:Array(String)}
    GROUP BY request_id
)
"""
_DELETE_FORMER = """
DELETE FROM requests
WHERE request_id IN {ids:Array(String)}
    AND (request_id, toStartOfMinute(received_at)) NOT IN
    (
        SELECT request_id, toStartOfMinute(min(received_at))
        FROM generation_rows FINAL
        WHERE request_id IN {ids:Array(String)}
        GROUP BY request_id
    )
"""


async def merge_generations(store: Store, request_ids: Iterable[str]) -> list[int]:
    """Make the rows of these requests anew. Returns times, UTC epoch in ns, whose minutes are to be
    counted again. Raises StoreUnavailableError."""
    touched: list[int] = []
    all_ids = sorted(set(request_ids))
    for first in range(0, len(all_ids), _IDS):
        parameters = {"ids": all_ids[first : first + _IDS]}
        await store.command(_MERGE, parameters)
        ((ended_s, moved),) = await store.rows(_TOUCHED, parameters)
        if moved:
            await store.command(_DELETE_FORMER, {"ids": moved})
        touched += [second * _NS_PER_S for second in ended_s]
    return touched

"""Rows of requests with several generations, computed from their generations' rows.

They are recomputed completely whenever one of the generations is stored, so records may come in any
order, twice, and hours apart. Rows missed by a crash are computed when their records come again.
"""

from __future__ import annotations

from collections.abc import Iterable
from string import Template

from millrace.telemetry.store.store import Store
from millrace.telemetry.store.tables import MERGED_COLUMNS

# Limit of parameters in the address of a server's HTTP interface, which may have a million bytes.
_IDS = 1_000
_NS_PER_S = 1_000_000_000
_MERGE = Template("""
INSERT INTO requests ($names)
SELECT $values
FROM (SELECT * FROM generation_rows FINAL WHERE request_id IN {ids:Array(String)})
GROUP BY request_id
""").substitute(names=", ".join(MERGED_COLUMNS), values=", ".join(MERGED_COLUMNS.values()))
# The row of a request was, now or before, in the minutes in which its generations ended. Its key
# has the minute of the first receipt, so it had another key if the first received generation was
# stored after others.
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
    """Recompute the rows of these requests.

    Returns times, UTC epoch in ns, whose minutes must be counted again. Raises
    StoreUnavailableError.
    """
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

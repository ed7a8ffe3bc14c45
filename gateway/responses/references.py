"""References to items of earlier answers, by their ids."""

from __future__ import annotations

import re
from collections.abc import Sequence

from millrace.gateway.responses.input import GivenItems
from millrace.gateway.responses.store import ResponseStore, conversation_of, is_over
from millrace.schemas.errors import MillraceError, ParameterError
from millrace.schemas.responses.items import Item, ItemReference

# Ids of ``items.OutputItems`` and ``input.named``: the middle is from the answer's own id.
_OURS = re.compile(r"[a-z]+_([0-9a-f]{24})_(?:in)?[0-9]+")
_RESPONSE_ID = "resp-{stem}"
_MAX_ANSWERS = 100


class ItemNotFoundError(MillraceError, code="item_not_found", http_status=404):
    """Item id that is unknown for this tenant."""

    def __init__(self, param: str, item_id: str) -> None:
        super().__init__(
            f"{param}: there is no item {item_id!r:.100}: its answer still runs, was not stored or "
            "expired."
        )
        self.param = param


async def resolve(
    said: GivenItems,
    earlier: Sequence[Item],
    tenant: str,
    store: ResponseStore,
    field: str = "input",
) -> tuple[Item, ...]:
    """Return the items, with references resolved from ``earlier`` or from the tenant's stored
    answers.

    Raises ItemNotFoundError, RedisUnreachableError, and ParameterError for items of too many
    answers.
    """
    items = said.items
    if not any(isinstance(item, ItemReference) for item in items):
        return tuple(item for item in items if not isinstance(item, ItemReference))
    known = {item.id: item for item in earlier}
    looked_up: set[str] = set()
    resolved: list[Item] = []
    for item, path in zip(items, said.paths, strict=True):
        if not isinstance(item, ItemReference):
            resolved.append(item)
            continue
        param = f"{path}.id"
        found = _OURS.fullmatch(item.id)
        if item.id not in known and found is not None and found[1] not in looked_up:
            if len(looked_up) == _MAX_ANSWERS:
                message = (
                    f"{field} names items of more than {_MAX_ANSWERS} answers; send some whole."
                )
                raise ParameterError(param, message)
            looked_up.add(found[1])
            stored = await store.get(tenant, _RESPONSE_ID.format(stem=found[1]))
            if stored is not None and is_over(stored):
                known |= {one.id: one for one in conversation_of(stored)}
        if item.id not in known:
            raise ItemNotFoundError(param, item.id)
        resolved.append(known[item.id])
    return tuple(resolved)

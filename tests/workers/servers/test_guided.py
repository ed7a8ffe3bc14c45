"""Position of a guide in a completion that another engine began."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from millrace.registry.served import ServedModel
from millrace.schemas.sampling import Grammar, GrammarKind
from millrace.workers.servers.dialect import ServerStreamError
from millrace.workers.servers.dialects.json_grammars import with_few_blanks
from millrace.workers.servers.guided import Guides
from tests.workers.conformance import request

_ANY = Grammar(kind=GrammarKind.JSON_OBJECT)


@pytest_asyncio.fixture
async def guides(model: ServedModel) -> AsyncIterator[Guides]:
    made = Guides(model)
    yield made
    made.close()


def _tokens(model: ServedModel, text: str) -> list[int]:
    return model.tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize(
    ("begun", "has_blanks"),
    [('{"a": 1', False), ('{ "a": 1', True)],
    ids=["by the server", "by another engine"],
)
async def test_guide_reads_the_grammar_as_the_engine_that_began(
    model: ServedModel, guides: Guides, begun: str, has_blanks: bool
) -> None:
    guide = await guides.start(
        request("r", grammar=_ANY), with_few_blanks(_ANY), _tokens(model, begun)
    )
    allowed = {int(token_id) for token_id in guide.allowed()}
    assert set(_tokens(model, "}")) <= allowed
    assert (set(_tokens(model, " ")) <= allowed) is has_blanks


async def test_what_no_reading_leads_to_cannot_go_on(model: ServedModel, guides: Guides) -> None:
    asked, read = request("r", grammar=_ANY), with_few_blanks(_ANY)
    with pytest.raises(ServerStreamError, match="reads the grammar differently"):
        await guides.start(asked, read, _tokens(model, '["a"'))

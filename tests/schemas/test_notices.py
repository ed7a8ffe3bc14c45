"""Notices as header fields, and their number in an answer."""

from __future__ import annotations

from pathlib import Path

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from millrace.schemas.notices import (
    MAX_NOTICE_CHARACTERS,
    MAX_NOTICES,
    Notice,
    NoticeCode,
    bounded,
    field_of,
    header_value,
    notice,
)

DOCS = Path(__file__).parents[2] / "docs" / "notices.md"


def test_a_header_names_the_field_and_what_is_left_out() -> None:
    told = (
        notice(NoticeCode.TOOL_LEFT_OUT, "tools[0]", "web_search"),
        notice(NoticeCode.SCHEMA_KEYWORD_DROPPED, 'tools[1].a"b\\', "pattern"),
    )
    assert header_value(told) == (
        b'tool_left_out;param="tools[0]";detail="web_search", '
        b'schema_keyword_dropped;param="tools[1].a\\"b\\\\";detail="pattern"'
    )


@given(st.text(), st.text())
def test_header_is_one_line_of_ascii_for_any_request(param: str, detail: str) -> None:
    value = header_value((notice(NoticeCode.TOOL_LEFT_OUT, param, detail),))
    assert all(0x20 <= byte <= 0x7E for byte in value)
    assert len(value) < 5 * MAX_NOTICE_CHARACTERS


def test_an_answer_has_at_most_16_notices_and_says_how_many_more_there_were() -> None:
    many = [notice(NoticeCode.TOOL_LEFT_OUT, f"tools[{i}]") for i in range(MAX_NOTICES + 4)]
    assert bounded(many[:MAX_NOTICES]) == tuple(many[:MAX_NOTICES])
    *kept, last = bounded(many)
    assert kept == many[: MAX_NOTICES - 1]
    assert last == Notice(NoticeCode.NOTICES_LEFT_OUT, detail="5")


def test_notices_that_were_left_out_before_are_counted() -> None:
    """The items, the tools and the schemas of a request each have notices."""
    items = [notice(NoticeCode.ITEM_LEFT_OUT, f"input[{i}]") for i in range(40)]
    tools = [notice(NoticeCode.TOOL_LEFT_OUT, f"tools[{i}]") for i in range(3)]
    *kept, last = bounded((*bounded(items), *tools))
    assert kept == items[: MAX_NOTICES - 1]
    assert last == Notice(NoticeCode.NOTICES_LEFT_OUT, detail="28")
    assert bounded((*bounded(tools), *items)) == bounded((*tools, *items))
    assert bounded(bounded(items)) == bounded(items)


def test_an_answer_without_notices_has_no_field() -> None:
    assert field_of(()) is msgspec.UNSET


def test_the_docs_explain_each_code() -> None:
    page = DOCS.read_text()
    for code in NoticeCode:
        assert f"\n| `{code.value}` | " in page

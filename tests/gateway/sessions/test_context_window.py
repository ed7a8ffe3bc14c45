"""Removal of turns from a conversation that exceeds a context window."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.gateway.sessions.context_window import (
    Counted,
    Fitted,
    Window,
    continue_with,
    count,
    fit,
    text_of,
    turns,
)
from millrace.registry.catalogue import load_catalogue
from millrace.registry.served import ServedModel
from millrace.schemas.errors import ParameterError
from millrace.schemas.jobs import ChatMessage
from millrace.schemas.tools import ToolCall

NUM_TEMPLATE_TOKENS = 3
CALL = (ToolCall(id="c", name="look", arguments="{}"),)


def encode(messages: Sequence[ChatMessage]) -> list[int]:
    """A template that puts something around each message; a character is a token."""
    return [0] * sum(len(text_of(message)) + NUM_TEMPLATE_TOKENS for message in messages)


def counted(messages: Sequence[ChatMessage]) -> tuple[Counted, ...]:
    return count([Counted(message) for message in messages], "m", len)


def window(num_tokens: int, max_tokens: int | None = 1) -> Window:
    return Window(num_tokens=num_tokens, max_tokens=max_tokens, reserve_tokens=64)


def fitted(
    history: Sequence[ChatMessage],
    turn: Sequence[ChatMessage],
    room: Window,
    summary: str = "",
) -> Fitted:
    return fit(counted(history), counted(turn), summary, room, encode)


def user(text: str) -> ChatMessage:
    return ChatMessage("user", text)


def assistant(text: str) -> ChatMessage:
    return ChatMessage("assistant", text)


def system(text: str) -> ChatMessage:
    return ChatMessage("system", text)


texts = st.text("ab ", max_size=30)


@st.composite
def exchanges(draw: st.DrawFn) -> list[ChatMessage]:
    """A question with its answer, maybe by way of tools, or a system message."""
    kind = draw(st.sampled_from(["talk", "talk", "tools", "system"]))
    if kind == "system":
        return [system(draw(texts))]
    asked = [user(draw(texts))]
    if kind == "tools":
        asked += [
            ChatMessage("assistant", draw(texts), tool_calls=CALL),
            ChatMessage("tool", draw(texts), tool_call_id="c"),
        ]
    return [*asked, assistant(draw(texts))]


histories = st.lists(exchanges(), max_size=12).map(lambda found: [m for one in found for m in one])


@given(histories, texts, st.integers(8, 600), st.sampled_from(["", "what was said"]))
def test_the_newest_turns_that_fit_are_kept(
    history: list[ChatMessage], text: str, num_tokens: int, summary: str
) -> None:
    turn = [user(text)]
    room = window(num_tokens)
    result = fitted(history, turn, room, summary)
    systems = [message for message in history if message.role == "system"]
    least = len(encode([*systems, *turn]))
    if least <= room.wanted_prompt_tokens:
        assert result.num_prompt_tokens <= room.wanted_prompt_tokens
    assert result.num_prompt_tokens == len(encode(result.messages))

    turns = [message for message in result.messages if message.role != "system"]
    all_said = [message for message in (*history, *turn) if message.role != "system"]
    assert turns == all_said[len(all_said) - len(turns) :], "the newest stay, in order"
    assert result.num_dropped == len(all_said) - len(turns)
    assert turns[-1] == turn[-1]
    assert turns[0].role == "user", "turns are left out whole"
    in_prompt = "\n\n".join(message.content for message in result.messages)
    assert all(message.content in in_prompt for message in systems)
    assert result.with_summary == bool(summary and summary in result.messages[0].content)


@given(histories, texts, st.integers(8, 600))
def test_a_result_is_never_apart_from_its_call(
    history: list[ChatMessage], text: str, num_tokens: int
) -> None:
    """Also when the request brings the result of a call that is in the history."""
    asked = [user(text), ChatMessage("assistant", "", tool_calls=CALL)]
    turn = [ChatMessage("tool", text, tool_call_id="c")]
    result = fitted([*history, *asked], turn, window(num_tokens))
    assert result.messages[-3:] == (*asked, *turn)
    open_calls = 0
    for message in result.messages:
        if message.role == "tool":
            assert open_calls == 1
            open_calls = 0
        open_calls += len(message.tool_calls)


@given(histories, texts)
def test_a_conversation_that_fits_is_unchanged(history: list[ChatMessage], text: str) -> None:
    whole = [*history, user(text)]
    result = fitted(history, [user(text)], window(len(encode(whole)) + 1))
    assert (list(result.messages), result.num_dropped) == (whole, 0)


@given(histories, texts, st.integers(8, 600))
def test_no_more_is_left_out_than_needed(
    history: list[ChatMessage], text: str, num_tokens: int
) -> None:
    """A further turn would exceed the window, apart from the estimated tokens of the template."""
    room = window(num_tokens)
    result = fitted(history, [user(text)], room)
    groups = turns(history)
    num_groups = next(i for i in range(len(groups) + 1) if _size(groups[:i]) == result.num_dropped)
    if num_groups == 0:
        return
    stay = {index for group in groups[num_groups - 1 :] for index in group}
    longer = [one for i, one in enumerate(history) if one.role == "system" or i in stay]
    slack = NUM_TEMPLATE_TOKENS * (len(history) + 1)
    assert len(encode([*longer, user(text)])) + slack > room.wanted_prompt_tokens


def _size(groups: list[list[int]]) -> int:
    return sum(len(group) for group in groups)


def test_room_for_an_answer_of_no_stated_length() -> None:
    history = [user("x" * 20), assistant("y" * 20)]
    num_tokens = len(encode([*history, user("z")]))
    assert fitted(history, [user("z")], window(num_tokens + 64, None)).num_dropped == 0
    assert fitted(history, [user("z")], window(num_tokens + 10, None)).num_dropped == 2
    # A small window keeps three quarters for the prompt.
    assert window(40, None).wanted_prompt_tokens == 30


def test_what_is_too_long_alone_is_left_to_be_refused() -> None:
    result = fitted([user("a"), assistant("b")], [user("z" * 100)], window(50), "summary")
    assert result.messages == (user("z" * 100),)
    assert result.num_dropped == 2
    assert not result.with_summary


def test_a_summary_stands_in_the_one_system_message() -> None:
    history = [system("Be brief."), user("new"), assistant("yes")]
    result = fitted(history, [user("and?")], window(1_000), "They met.")
    (first, *rest) = result.messages
    assert first == system("Be brief.\n\nSummary of the earlier conversation:\nThey met.")
    assert rest == [user("new"), assistant("yes"), user("and?")]


def test_system_messages_that_come_together_become_one() -> None:
    history = [system("a"), user("x" * 50), assistant("y" * 50), system("b"), user("u")]
    result = fitted(history, [user("v")], window(60))
    assert result.messages == (system("a\n\nb"), user("u"), user("v"))


def test_a_template_that_takes_no_system_message_gets_no_summary() -> None:
    def strict(messages: Sequence[ChatMessage]) -> list[int]:
        if any(message.role == "system" for message in messages):
            raise ParameterError("messages", "no system message, please")
        return encode(messages)

    result = fit(counted([user("a")]), counted([user("b")]), "summary", window(100), strict)
    assert result.messages == (user("a"), user("b"))
    assert not result.with_summary
    with pytest.raises(ParameterError, match="please"):
        fit((), counted([system("a"), user("b")]), "", window(100), strict)


def test_a_system_message_sent_anew_replaces_the_old_one() -> None:
    history = counted([system("old"), user("a"), assistant("b")])
    assert continue_with(history, counted([user("c")]))[0] == history
    kept, turn = continue_with(history, counted([system("new"), user("c")]))
    assert [one.message for one in kept] == [system("new"), user("a"), assistant("b")]
    assert [one.message for one in turn] == [user("c")]


def test_messages_are_counted_once() -> None:
    asked: list[str] = []

    def num_tokens(text: str) -> int:
        asked.append(text)
        return len(text)

    first = count([Counted(user("abc")), Counted(assistant("d"))], "m", num_tokens)
    assert [one.num_tokens for one in first] == [3, 1]
    assert count(first, "m", num_tokens) == first
    assert asked == ["abc", "d"]
    assert [one.model for one in count(first, "n", num_tokens)] == ["n", "n"]
    assert len(asked) == 4


def test_with_the_template_and_tokenizer_of_the_demo_model() -> None:
    model = ServedModel.load(load_catalogue(""), "demo")
    tokenizer = model.tokenizer
    history: list[ChatMessage] = [system("You answer questions about LLM serving.")]
    for number in range(40):
        history += [
            user(f"Question {number}: what is the time to the first token?"),
            assistant(f"Answer {number}: it is the time until the first token comes. " * 4),
        ]
    calls = 0

    def encode_chat(messages: Sequence[ChatMessage]) -> list[int]:
        nonlocal calls
        calls += 1
        return tokenizer.encode_chat(messages)

    def counted_by_model(messages: Sequence[ChatMessage]) -> tuple[Counted, ...]:
        return count(
            [Counted(message) for message in messages],
            "demo",
            lambda text: len(tokenizer.encode(text, False)),
        )

    room = Window(num_tokens=model.context_window_tokens, max_tokens=200, reserve_tokens=64)
    turn = counted_by_model([user("And the last one?")])
    result = fit(counted_by_model(history), turn, "", room, encode_chat)
    assert result.num_dropped > 0
    assert result.messages[0] == history[0]
    assert result.num_prompt_tokens <= model.context_window_tokens - 200
    oldest = result.num_dropped
    one_more = (history[0], *history[oldest - 1 :], user("And the last one?"))
    assert len(tokenizer.encode_chat(one_more)) > model.context_window_tokens - 200
    assert calls <= 3

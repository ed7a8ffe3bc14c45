"""Log-probabilities of tokens that are no whole characters, and of tokens that were chosen against
the likeliest, at every endpoint that tells of them."""

from __future__ import annotations

import codecs
import json
from typing import Any

import httpx
import openai
import pytest
import websockets
from websockets.typing import Subprotocol

from tests.support.running_gateway import MODEL, RunningGateway

_TEXTS = ["a\U0001f600b", "\u4f60\u597d, \u4e16\u754c!", "\U0001f468\u200d\U0001f469\u00e9x"]


def answer(front: RunningGateway, raw: bytes) -> list[str]:
    """Have the worker generate these bytes, one per token, and return the text of each token.

    The last token has the rest of the text.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    texts = [decoder.decode(bytes([one])) for one in raw]
    texts[-1] += decoder.decode(b"", final=True)
    front.worker.answer_ids = raw
    front.worker.script = lambda _job: texts
    return texts


async def completion(front: RunningGateway, **fields: Any) -> list[dict[str, Any]]:
    """Return the choices of a completion, with a stream's deltas joined."""
    body = {"model": MODEL, "prompt": "x", "logprobs": 2, **fields}
    async with httpx.AsyncClient(base_url=front.url, timeout=10) as http:
        got = await http.post("/v1/completions", json=body)
    assert got.status_code == 200, got.text
    if not fields.get("stream"):
        return list(got.json()["choices"])
    lines = [line.removeprefix("data: ") for line in got.text.splitlines() if "{" in line]
    choices: dict[int, dict[str, Any]] = {}
    for line in lines:
        for one in json.loads(line)["choices"]:
            whole = choices.setdefault(one["index"], {"text": "", "logprobs": {}})
            whole["text"] += one["text"]
            for name, some in (one["logprobs"] or {}).items():
                whole["logprobs"].setdefault(name, []).extend(some)
    return [choices[index] for index in sorted(choices)]


def offsets_of(text: str) -> list[int]:
    """Return, for each byte, the offset of its character."""
    return [at for at, character in enumerate(text) for _ in character.encode()]


@pytest.mark.parametrize("text", _TEXTS)
@pytest.mark.parametrize("tokens_per_frame", [1, 3, 50])
async def test_tokens_of_one_character_begin_where_it_does(
    front: RunningGateway, text: str, tokens_per_frame: int
) -> None:
    answer(front, text.encode())
    front.worker.tokens_per_frame = tokens_per_frame
    (whole,) = await completion(front)
    (streamed,) = await completion(front, stream=True)
    assert whole["text"] == streamed["text"] == text
    assert whole["logprobs"]["text_offset"] == offsets_of(text)
    assert streamed["logprobs"] == whole["logprobs"]


@pytest.mark.parametrize("as_ids", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_an_echo_and_several_choices(
    front: RunningGateway, *, stream: bool, as_ids: bool
) -> None:
    prompt, text = "\u4f60 \U0001f600", "\U0001f468!"
    answer(front, text.encode())
    asked = list(prompt.encode()) if as_ids else prompt
    choices = await completion(front, prompt=asked, echo=True, n=2, stream=stream)
    assert len(choices) == 2
    for choice in choices:
        assert choice["text"] == prompt + text
        assert choice["logprobs"]["text_offset"] == offsets_of(prompt + text)


@pytest.mark.parametrize(
    ("raw", "text", "offsets"),
    [
        # Never completed, completed by a wrong byte, and a byte that begins nothing.
        (b"a\xf0\x9f", "a\ufffd", [0, 1, 1]),
        (b"\xf0\x9fab", "\ufffdab", [0, 0, 1, 2]),
        (b"\xff\xffa", "\ufffd\ufffda", [0, 1, 2]),
        ("\ufffda".encode(), "\ufffda", [0, 0, 0, 1]),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_bytes_that_are_no_text(
    front: RunningGateway, raw: bytes, text: str, offsets: list[int], *, stream: bool
) -> None:
    answer(front, raw)
    (choice,) = await completion(front, stream=stream)
    assert choice["text"] == text
    assert choice["logprobs"]["text_offset"] == offsets


@pytest.mark.parametrize("stream", [False, True])
async def test_text_that_was_held_back(front: RunningGateway, *, stream: bool) -> None:
    """The text may begin a stop string, so it comes with a later token."""
    front.worker.answer_ids = b"abc"
    front.worker.script = lambda _job: ["", "", "abc"]
    (choice,) = await completion(front, stop=["abd"], stream=stream)
    assert choice["text"] == "abc"
    assert choice["logprobs"]["text_offset"] == [0, 1, 2]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_that_ends_within_a_character(
    front: RunningGateway, *, stream: bool
) -> None:
    prompt, rest = list(b"a\xf0\x9f"), b"\x98\x80!"
    front.worker.answer_ids = rest
    front.worker.script = lambda _job: ["", "\U0001f600", "!"]
    (choice,) = await completion(front, prompt=prompt, echo=True, stream=stream)
    assert choice["text"] == "a\ufffd\U0001f600!"
    assert choice["logprobs"]["text_offset"] == [0, 1, 1, 2, 2, 3]
    (alone,) = await completion(front, prompt=prompt, stream=stream)
    assert alone["logprobs"]["text_offset"] == [0, 0, 1]


@pytest.mark.parametrize("stream", [False, True])
async def test_alternatives_that_are_no_characters_are_told_apart(
    front: RunningGateway, *, stream: bool
) -> None:
    answer(front, b"\xf0\x9f\x98\x80")
    (choice,) = await completion(front, stream=stream)
    lists = choice["logprobs"]
    assert lists["tokens"] == [f"bytes:\\x{one:02x}" for one in b"\xf0\x9f\x98\x80"]
    assert lists["top_logprobs"][0] == {"bytes:\\xf0": -0.5, "bytes:\\xf1": -1.5}
    assert [len(one) for one in lists["top_logprobs"]] == [2] * 4


async def test_the_chosen_token_is_among_the_alternatives_everywhere(
    front: RunningGateway, client: openai.AsyncOpenAI
) -> None:
    """The likeliest ones were masked: it comes after them. Without alternatives there is none."""
    answer(front, b"h\xf0")
    front.worker.first_rank = 5
    expected = [("m", -5.5), ("n", -6.5), ("h", -0.5)]
    (choice,) = await completion(front)
    assert list(choice["logprobs"]["top_logprobs"][0].items()) == expected
    (choice,) = await completion(front, logprobs=0)
    assert choice["logprobs"]["top_logprobs"][0] == {"h": -0.5}

    def check(infos: list[Any]) -> None:
        read = json.loads(json.dumps(infos))
        found = [(one["token"], one["logprob"]) for one in read[0]["top_logprobs"]]
        assert found == expected
        assert read[1]["token"] == "bytes:\\xf0"
        assert read[1]["bytes"] == [0xF0]
        assert [one["bytes"] for one in read[1]["top_logprobs"]] == [[0xF5], [0xF6], [0xF0]]

    fields: dict[str, Any] = {"messages": [{"role": "user", "content": "?"}]}
    whole = await client.chat.completions.create(
        model=MODEL, logprobs=True, top_logprobs=2, **fields
    )
    assert whole.choices[0].logprobs is not None
    check([one.model_dump() for one in whole.choices[0].logprobs.content or ()])
    streamed: list[Any] = []
    async for chunk in await client.chat.completions.create(
        model=MODEL, logprobs=True, top_logprobs=2, stream=True, **fields
    ):
        for one in chunk.choices:
            if one.logprobs is not None:
                streamed += [info.model_dump() for info in one.logprobs.content or ()]
    check(streamed)
    response = await client.responses.create(
        model=MODEL, input="?", top_logprobs=2, include=["message.output_text.logprobs"]
    )
    check(response.model_dump()["output"][0]["content"][0]["logprobs"])
    none = await client.chat.completions.create(model=MODEL, logprobs=True, **fields)
    assert none.choices[0].logprobs is not None
    assert (none.choices[0].logprobs.content or [])[0].top_logprobs == []
    url = front.url.replace("http", "ws") + "/v1/ws"
    async with websockets.connect(url, subprotocols=[Subprotocol("millrace.v1")]) as socket:
        asked = {"type": "generate", "id": "1", "model": MODEL, "logprobs": True, "top_logprobs": 2}
        await socket.send(json.dumps({**asked, **fields}))
        infos: list[Any] = []
        while True:
            message = json.loads(await socket.recv())
            infos += message.get("logprobs", ())
            if message["type"] in ("done", "error"):
                break
    assert message["type"] == "done", message
    check(infos)

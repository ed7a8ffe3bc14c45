"""Two gateways on one port: clients of a dead gateway continue their answers at the other."""

from __future__ import annotations

import asyncio
import os
import runpy
import signal
import uuid

import httpx
import psutil
import pytest

from tests.e2e.clients import Answer, chat_body
from tests.e2e.gateways.names import GATEWAYS
from tests.e2e.resuming import EventClient, Persistent, SocketClient, WholeClient
from tests.support.system import System
from tests.support.waiting import eventually

pytestmark = pytest.mark.e2e

NUM_CLIENTS = 12
NUM_TOKENS = 250
KINDS: tuple[type[Persistent], ...] = (SocketClient, EventClient, WholeClient)


@pytest.fixture(scope="module")
def undisturbed(pair: System) -> list[Answer]:
    """The answers to the clients when nothing is killed."""

    async def ask_all() -> list[Answer]:
        return await asyncio.gather(*(client.ask() for client in _clients(pair)))

    return asyncio.run(ask_all())


def test_as_many_schedulers_serve_as_were_asked_for(pair: System) -> None:
    run = pair.data / "run"
    pids = [int((run / f"scheduler-{number}.pid").read_text()) for number in (1, 2)]
    for pid in pids:
        assert "millrace.scheduler" in psutil.Process(pid).cmdline()
    assert len(set(pids)) == 2


def _clients(system: System) -> list[Persistent]:
    """All three kinds, each on a connection of its own."""
    return [
        KINDS[number % len(KINDS)](
            system, f"What is TTFT? {number}", max_tokens=NUM_TOKENS, ignore_eos=True
        )
        for number in range(NUM_CLIENTS)
    ]


async def _end_while_streaming(
    system: System, undisturbed: list[Answer], number: signal.Signals, *parts: str
) -> list[Persistent]:
    """Signal parts while all clients are in the middle; the clients, with their answers checked."""
    clients = _clients(system)
    tasks = [asyncio.create_task(client.ask()) for client in clients]
    streaming = [client for client in clients if not isinstance(client, WholeClient)]
    await eventually(lambda: all(client.num_tokens for client in streaming), timeout_s=30.0)
    ended = {part: system.pid(part) for part in parts}
    for pid in ended.values():
        os.kill(pid, number)
    answers = await asyncio.wait_for(asyncio.gather(*tasks), timeout=90.0)
    assert [answer.text for answer in answers] == [answer.text for answer in undisturbed]
    assert [answer.completion_tokens for answer in answers] == [NUM_TOKENS] * NUM_CLIENTS
    assert any(client.num_connections > 1 for client in clients)
    await _recorded_once(system, answers)
    await eventually(
        lambda: all(system.pid(part) != pid for part, pid in ended.items()), timeout_s=30.0
    )
    return clients


async def _recorded_once(system: System, answers: list[Answer]) -> None:
    ids = ", ".join(f"'{answer.request_id}'" for answer in answers)
    query = (
        "SELECT request_id, count() AS num_rows, any(status) AS status, "
        "any(completion_tokens) AS completion_tokens "
        f"FROM requests FINAL WHERE request_id IN ({ids}) GROUP BY request_id"
    )
    await eventually(lambda: len(system.sql(query)) == NUM_CLIENTS, what="rows")
    for row in system.sql(query):
        figures = (int(row["num_rows"]), row["status"], int(row["completion_tokens"]))
        assert figures == (1, "done", NUM_TOKENS)


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param(("gateway-1",), id="one"),
        pytest.param(GATEWAYS, id="both"),
        pytest.param(
            ("gateway-2", "worker-1"),
            id="one-and-the-worker",
            marks=pytest.mark.slow(reason="the other cases and test_kill.py kill each part"),
        ),
    ],
)
async def test_clients_go_on_when_gateways_are_killed(
    pair: System, undisturbed: list[Answer], parts: tuple[str, ...]
) -> None:
    await _end_while_streaming(pair, undisturbed, signal.SIGKILL, *parts)


async def test_a_gateway_that_shuts_down_cuts_nobody_off_without_a_word(
    pair: System, undisturbed: list[Answer]
) -> None:
    clients = await _end_while_streaming(pair, undisturbed, signal.SIGTERM, "gateway-1")
    assert [client.unannounced for client in clients] == [0] * NUM_CLIENTS


async def test_a_turn_is_in_its_session_once_though_its_gateway_died(pair: System) -> None:
    system, session_id = pair, uuid.uuid4().hex
    client = SocketClient(
        system, "What is TTFT?", session_id=session_id, max_tokens=NUM_TOKENS, ignore_eos=True
    )
    task = asyncio.create_task(client.ask())
    await eventually(lambda: client.num_tokens > 0, timeout_s=30.0)
    for gateway in GATEWAYS:
        system.kill(gateway)
    answer = await asyncio.wait_for(task, timeout=60.0)
    assert client.num_connections > 1
    async with httpx.AsyncClient(base_url=system.http) as http:
        session = (await http.get(f"/v1/sessions/{session_id}")).json()
    assert [(turn["role"], turn["content"]) for turn in session["messages"]] == [
        ("user", "What is TTFT?"),
        ("assistant", answer.text),
    ]


async def test_rounds_of_tools_go_on_after_a_kill(pair: System) -> None:
    """The gateways die when the tool's result is in the next prompt, or about to be."""
    system = pair

    def client() -> SocketClient:
        return SocketClient(
            system,
            "What is TTFT?",
            server_tools=["weather"],
            tool_choice="required",
            max_tokens=NUM_TOKENS,
        )

    undisturbed = await client().ask()
    killed = client()
    task = asyncio.create_task(killed.ask())
    await eventually(lambda: bool(killed.steps), timeout_s=30.0)
    for gateway in GATEWAYS:
        system.kill(gateway)
    answer = await asyncio.wait_for(task, timeout=60.0)
    assert killed.num_connections > 1
    assert (answer.text, answer.completion_tokens) == (
        undisturbed.text,
        undisturbed.completion_tokens,
    )
    assert list(killed.steps.values()) == [True]
    query = (
        "SELECT generation_id FROM generations FINAL "
        f"WHERE request_id = '{answer.request_id}' ORDER BY round"
    )
    rounds = [answer.request_id, f"{answer.request_id}-r1"]
    await eventually(lambda: [row["generation_id"] for row in system.sql(query)] == rounds)


async def test_what_a_client_has_let_go_of_can_be_had_by_its_key(pair: System) -> None:
    """The first connection is gone before it has seen anything; the answer is made once."""
    headers = {"Idempotency-Key": uuid.uuid4().hex}
    body = chat_body("What is a KV cache?", stream=True)
    async with httpx.AsyncClient(base_url=pair.http, timeout=60.0) as http:
        async with http.stream(
            "POST", "/v1/chat/completions", json=body, headers=headers
        ) as response:
            first_id = response.headers["x-request-id"]
        again = await http.post("/v1/chat/completions", json=body, headers=headers)
        other = await http.post("/v1/chat/completions", json=body | {"seed": 1}, headers=headers)
    assert again.headers["x-request-id"] == first_id
    assert again.text.endswith("data: [DONE]\n\n")
    assert other.status_code == 409
    assert other.json()["error"]["code"] == "idempotency_conflict"


def test_the_example_of_the_documents_goes_on_after_a_kill(
    pair: System, undisturbed: list[Answer]
) -> None:
    example = runpy.run_path("docs/examples/resume_stream.py")
    options = {"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True}
    pieces = []
    for number, piece in enumerate(example["answer"](pair.http, "What is TTFT? 0", **options)):
        pieces.append(piece)
        if number == 3:
            killed = [pair.kill(gateway) for gateway in GATEWAYS]
    assert len(killed) == 2
    assert "".join(pieces) == undisturbed[0].text

"""Ports for the parts of a system on one machine."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from millrace.cli.local.ports import PortPicker, PortTakenError, holder_of
from millrace.schemas.errors import ConfigError


def test_no_port_is_given_twice() -> None:
    picker = PortPicker()
    first = picker.pick("one", 20_000)
    second = picker.pick("two", first)
    assert second > first
    assert picker.moved[-1] == f"two: port {first} is taken, using {second}"


def test_what_somebody_else_was_given_is_taken_until_it_is_closed() -> None:
    """The other system starts at the same moment, and its servers do not listen yet."""
    first, second = PortPicker(), PortPicker()
    port = first.pick("gateway", 20_000)
    moved = second.pick("clickhouse", port)
    assert moved > port
    first.close()
    assert PortPicker().pick("gateway", port) == port


def test_processes_never_choose_the_same() -> None:
    code = (
        "from millrace.cli.local.ports import PortPicker\n"
        "picker = PortPicker()\n"
        "print(*(picker.pick('nats', 20_400) for _ in range(20)), flush=True)\n"
        "input()"
    )
    run = (sys.executable, "-c", code)
    systems = [
        subprocess.Popen(run, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(3)
    ]
    chosen = [system.stdout.readline().split() for system in systems if system.stdout]
    for system in systems:
        system.communicate(b"\n")
    ports = [port for one in chosen for port in one]
    assert len(ports) == len(set(ports)) == 60


def test_a_port_that_is_in_use_is_taken() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        used = server.getsockname()[1]
        if used < 65_000:
            assert PortPicker().pick("one", used) > used


@pytest.mark.parametrize("wanted", [0, -1, 65_536])
def test_what_is_no_port_is_refused(wanted: int) -> None:
    with pytest.raises(ConfigError, match="a port is between 1 and 65535"):
        PortPicker().pick("one", wanted)


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match="is not an address of this machine"):
        PortPicker(host="203.0.113.7").pick("gateway", 20_000)


def test_a_port_that_was_asked_for_is_that_one_or_an_error_with_who_has_it() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        used = server.getsockname()[1]
        with pytest.raises(PortTakenError, match=rf"port {used} is taken \(pid {os.getpid()}, "):
            PortPicker().pick_exactly("gateway", used)
    assert holder_of(used) is None
    first = PortPicker()
    assert first.pick_exactly("gateway", used) == used
    with pytest.raises(PortTakenError, match=rf"port {used} is taken\. Stop"):
        PortPicker().pick_exactly("gateway", used)  # another system that is starting


def test_any_port_is_a_free_one() -> None:
    picker = PortPicker()
    first, second = picker.pick_any("one"), picker.pick_any("two")
    assert first != second
    assert picker.moved == []

"""Systems reached over HTTP: their common client, and the start of local servers."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import time
import urllib.error
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.peers.loads import Load, measure
from benchmarks.support.figures import Figures, RequestTimes
from benchmarks.support.processes import end
from benchmarks.support.prompts import Prompt
from benchmarks.support.sse_load import COMPLETIONS, run_load
from millrace.registry.catalogue import Catalogue
from millrace.registry.served import ServedModel
from millrace.runtime.addresses import open_directly
from millrace.schemas.config import EngineConfig
from millrace.schemas.engines import EngineKind
from millrace.workers.servers.dialect import ServerAddress
from millrace.workers.servers.server_process import find_program
from millrace.workers.servers.starting import DIALECTS
from tests.support.servers import free_port
from tests.support.system import System

MAX_NUM_SEQUENCES = 32
# Option that precedes the socket's path in the arguments.
_SOCKET_OPTIONS = {EngineKind.VLLM: "--uds", EngineKind.LLAMACPP: "--host"}


@contextmanager
def serving(kind: str, model: Path, folder: Path) -> Iterator[str]:
    """Start a server of this kind; yield its URL, and stop it at the end of the context.

    Raises RuntimeError, with the end of its log, if it does not start.
    """
    engine, port = EngineKind(kind), free_port()
    catalogue = Catalogue({}).with_model(str(model))
    served = ServedModel.load(catalogue, catalogue.names()[0])
    dialect = DIALECTS[engine](
        served, EngineConfig(kind=engine, max_num_sequences=MAX_NUM_SEQUENCES), owned=True
    )
    program = find_program(dialect.program, "", dialect.package)
    address = ServerAddress(folder)
    command = dialect.command(program, address)
    arguments = list(command.arguments)
    at = arguments.index(str(address.socket))
    assert arguments[at - 1] == _SOCKET_OPTIONS[engine]
    arguments[at - 1 : at + 1] = ["--host", "127.0.0.1", "--port", str(port)]
    url = f"http://127.0.0.1:{port}"
    with running_server(url, arguments, command.environment, folder, dialect.health_path):
        yield url


_STARTS_WITHIN_S = 420.0
_POLL_S = 0.5
_PRELOADED = ("libtcmalloc_minimal.so.4", "libiomp5.so")
_LIBRARY_FOLDERS = (Path("/usr/lib/x86_64-linux-gnu"), Path("/usr/lib64"))


def measure_server(url: str, load: Load, runs: int, vocab_size: int, first_run: int = 0) -> Figures:
    """Measure a load against an OpenAI-compatible server, with its first model.

    Prompts are token ids, and answers are streamed; a part of an answer is an event with text.
    ``first_run`` is as for ``measure``.
    """
    model = _first_model(url)

    def send(load: Load, prompts: Sequence[Prompt]) -> Sequence[RequestTimes]:
        return asyncio.run(
            run_load(url, completions(model, load, prompts), load.streams, COMPLETIONS)
        ).requests

    return measure(send, load, runs, vocab_size, first_run)


def completions(model: str, load: Load, prompts: Sequence[Prompt]) -> list[dict[str, Any]]:
    """Return the bodies of greedy requests that run to their last token."""
    return [
        {
            "model": model,
            "prompt": prompt,
            "max_tokens": load.num_output_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        for prompt in prompts
    ]


@contextmanager
def millrace(checkpoint: Path, folder: Path) -> Iterator[str]:
    """Start ``millrace up``; yield its URL, and stop it at the end of the context."""
    arguments = ("--port", str(free_port()), "--model", str(checkpoint))
    system = System(folder / "data", arguments).start()
    try:
        yield system.http
    finally:
        system.stop()


@contextmanager
def vllm(python: Path, checkpoint: Path, folder: Path, *, eager: bool, cores: str) -> Iterator[str]:
    """Start vLLM's server with ``python``; yield its URL, and stop it at the end of the context.

    ``cores`` is the value of VLLM_CPU_OMP_THREADS_BIND: "auto" leaves a core to the server.

    Raises:
        RuntimeError: It does not start; the message has the end of its log.
    """
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [
        *(str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(checkpoint)),
        *("--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16"),
        *("--max-model-len", "4096", "--max-num-seqs", "64"),
        *(("--enforce-eager",) if eager else ()),
    ]
    variables = _vllm_variables(python, folder, cores)
    with running_server(url, command, variables, folder):
        yield url


@contextmanager
def running_server(
    url: str,
    command: Sequence[str],
    variables: Mapping[str, str],
    folder: Path,
    health_path: str = "/health",
) -> Iterator[None]:
    """Run a server, from when it is healthy until the end of the context.

    Raises RuntimeError, with the end of its log, if it does not start.
    """
    log = folder / "server.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            stdout=out,
            stderr=subprocess.STDOUT,
            cwd=folder,  # this folder's packages must not hide the server's own
            env={**os.environ, "PYTHONPATH": "", **variables},
        )
    try:
        _wait_until_healthy(url + health_path, process, log)
        yield
    finally:
        end(process)


def _vllm_variables(python: Path, folder: Path, cores: str) -> dict[str, str]:
    # Not resolved: a virtual environment's Python is a link out of it.
    bin_folder = python.absolute().parent
    libraries = [
        str(candidate)
        for name in _PRELOADED
        for candidate in (at / name for at in (bin_folder.parent / "lib", *_LIBRARY_FOLDERS))
        if candidate.is_file()
    ]
    return {
        "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}",  # ninja is there
        "LD_PRELOAD": ":".join(libraries),
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": cores,
        "VLLM_CACHE_ROOT": str(folder / "cache"),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def _wait_until_healthy(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline_s = time.monotonic() + _STARTS_WITHIN_S
    while not _is_healthy(url):
        if process.poll() is not None or time.monotonic() > deadline_s:
            end = log.read_text(errors="replace")[-3000:]
            raise RuntimeError(f"the server did not come up:\n{end}")
        time.sleep(_POLL_S)


def _is_healthy(url: str) -> bool:
    try:
        with open_directly(url, timeout_s=2.0) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _first_model(url: str) -> str:
    with open_directly(f"{url}/v1/models", timeout_s=10.0) as answer:
        models = json.load(answer)["data"]
    return str(models[0]["id"])

"""Runs other people's clients against a started system, each in an environment of its own.

``python -m tests.clients.run`` installs what is missing under ``.cache/clients``, starts ``millrace
up``, has each client send a few requests and reads what it says of them. Names after it choose
among the clients. The exit status is that of the worst: 1 if one failed. vLLM's is too large to be
installed for this alone: it runs where ``make engines-vllm`` was made.

A client is an entry of ``CLIENTS``: what it is made of, how it is started, and how many requests it
says went well. One with a Python API has a script of its own beside this file, which ends with a
traceback if anything is not as it should be.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.engine.checkpoints_made import write_checkpoint
from tests.support.repository import ROOT
from tests.support.system import System

_HERE = Path(__file__).parent
_MODEL = ROOT / "registry" / "demo" / "model"
_ENVIRONMENTS = ROOT / ".cache" / "clients"
_VLLM = ROOT / ".engines" / "vllm" / "bin"
_PORT = 18_800
_NUM_REQUESTS = 6
_PROMPT_TOKENS = 32
_OUTPUT_TOKENS = 16
_INSTALL_TIMEOUT_S = 900.0
_RUN_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Run:
    """Run of a client: the system's address, and the folder for the client's output."""

    url: str
    bin: Path
    out: Path

    def read(self, name: str) -> Any:
        return json.loads((self.out / name).read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Client:
    """``packages`` are pinned, as for pip; ``bin``: where its programs are, if they are not
    installed here. ``num_ok`` is read after ``command`` ended well, and must be ``expected``."""

    name: str
    packages: tuple[str, ...]
    command: Callable[[Run], Sequence[str]]
    num_ok: Callable[[Run], int]
    expected: int = _NUM_REQUESTS
    bin: Path | None = None


class FailedError(Exception):
    """A client could not be installed, or its output was wrong."""


def _guidellm(run: Run) -> Sequence[str]:
    return (
        *(str(run.bin / "guidellm"), "run", "--disable-console-interactive"),
        *("--backend", f"kind=openai_http,target={run.url},model=demo"),
        *("--profile", "kind=concurrent,streams=2"),
        *("--constraint", f"kind=max_requests,count={_NUM_REQUESTS}"),
        *("--tokenizer", f"kind=hf_auto,model={_MODEL}"),
        "--data",
        f"kind=synthetic_text,prompt_tokens={_PROMPT_TOKENS},output_tokens={_OUTPUT_TOKENS}",
        *("--output", f"kind=json,path={run.out / 'report.json'}"),
    )


def _guidellm_ok(run: Run) -> int:
    (benchmark,) = run.read("report.json")["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    return int(totals["successful"]) - int(totals["errored"])


def _aiperf(run: Run) -> Sequence[str]:
    return (
        *(str(run.bin / "aiperf"), "profile", "--ui", "none", "--artifact-dir", str(run.out)),
        *("--url", run.url, "--model", "demo", "--tokenizer", str(_MODEL)),
        *("--endpoint-type", "chat", "--streaming"),
        *("--use-server-token-count", "--per-chunk-usage"),
        *("--request-count", str(_NUM_REQUESTS), "--concurrency", "2"),
        *("--isl", str(_PROMPT_TOKENS), "--osl", str(_OUTPUT_TOKENS)),
    )


def _aiperf_ok(run: Run) -> int:
    report = run.read("profile_export_aiperf.json")
    return int(report["request_count"]["avg"]) - len(report["error_summary"])


def _vllm(backend: str, path: str) -> Callable[[Run], Sequence[str]]:
    def command(run: Run) -> Sequence[str]:
        return (
            *(str(run.bin / "python"), str(_HERE / "vllm_bench.py")),
            *("--backend", backend, "--endpoint", path, "--base-url", run.url),
            *("--model", "demo", "--tokenizer", str(_MODEL)),
            *("--dataset-name", "random", "--random-input-len", str(_PROMPT_TOKENS)),
            *("--random-output-len", str(_OUTPUT_TOKENS), "--num-prompts", str(_NUM_REQUESTS)),
            *("--max-concurrency", "2", "--ready-check-timeout-sec", "30"),
            *("--save-result", "--result-dir", str(run.out), "--result-filename", "result.json"),
        )

    return command


def _vllm_ok(run: Run) -> int:
    report = run.read("result.json")
    return int(report["completed"]) - int(report["failed"])


def _script(name: str) -> Callable[[Run], Sequence[str]]:
    return lambda run: (str(run.bin / "python"), str(_HERE / name), run.url, str(run.out))


def _script_ok(run: Run) -> int:
    return int(run.read("ok.json"))


CLIENTS = (
    Client(
        "litellm",
        ("litellm==1.106.2", "mcp==2.3.0"),
        _script("litellm_loop.py"),
        _script_ok,
        expected=5,
    ),
    Client(
        "anthropic", ("anthropic==2.12.0",), _script("anthropic_loop.py"), _script_ok, expected=5
    ),
    Client("cohere", ("cohere==7.3.1",), _script("cohere_rerank.py"), _script_ok, expected=5),
    Client("guidellm", ("guidellm==0.8.1",), _guidellm, _guidellm_ok),
    Client("aiperf", ("aiperf==0.13.0",), _aiperf, _aiperf_ok),
    Client("vllm-chat", (), _vllm("openai-chat", "/v1/chat/completions"), _vllm_ok, bin=_VLLM),
    Client("vllm-completions", (), _vllm("openai", "/v1/completions"), _vllm_ok, bin=_VLLM),
)


def main() -> int:
    """Prints a line for each client."""
    by_name = {client.name: client for client in CLIENTS}
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(by_name))
    names = parser.parse_args().names or by_name
    if not by_name.keys() >= set(names):
        parser.error(f"there are {', '.join(by_name)}")
    chosen = [by_name[name] for name in names]
    present = [client for client in chosen if client.bin is None or client.bin.is_dir()]
    for client in (one for one in chosen if one not in present):
        print(f"{client.name}: NOT RUN, {client.bin} is missing")
    failed = [client.name for client in present if not _install(client)]
    with _system() as url:
        for client in present:
            if client.name not in failed and not _runs(client, url):
                failed.append(client.name)
    print("FAILED: " + ", ".join(failed) if failed else f"{len(present)} clients ran well")
    return 1 if failed else 0


@contextmanager
def _system() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        ranker = write_checkpoint(
            Path(folder) / "ranker",
            architectures=["LlamaForSequenceClassification"],
            num_labels=1,
        )
        arguments = ("--port", str(_PORT), "--model", "demo", "--model", str(ranker))
        system = System(Path(folder) / "system", arguments=arguments).start()
        try:
            yield system.http
        finally:
            system.stop()


def _install(client: Client) -> bool:
    """Install the client into its environment, which is made again if its packages change."""
    if client.bin is not None:
        return True
    folder = _ENVIRONMENTS / client.name
    marker = folder / "installed"
    wanted = "\n".join(client.packages)
    if marker.is_file() and marker.read_text(encoding="utf-8") == wanted:
        return True
    try:
        _do(client, (sys.executable, "-m", "venv", "--clear", str(folder)), _INSTALL_TIMEOUT_S)
        pip = (str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet")
        _do(client, (*pip, *client.packages), _INSTALL_TIMEOUT_S)
    except FailedError as error:
        print(error)
        return False
    marker.write_text(wanted, encoding="utf-8")
    return True


def _runs(client: Client, url: str) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        run = Run(url, client.bin or _ENVIRONMENTS / client.name / "bin", Path(folder))
        try:
            _do(client, client.command(run), _RUN_TIMEOUT_S)
            num_ok = client.num_ok(run)
        except (FailedError, OSError, LookupError, ValueError) as error:
            print(f"{client.name}: FAILED\n{error}")
            return False
    verdict = "ok" if num_ok == client.expected else "FAILED"
    what = ", ".join(client.packages) or str(client.bin)
    print(f"{client.name}: {verdict}, {num_ok} of {client.expected} requests ({what})", flush=True)
    return verdict == "ok"


def _do(client: Client, command: Sequence[str], timeout_s: float) -> None:
    # Its own packages only; and nothing is to be looked up in a hub.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "HF_HUB_DISABLE_TELEMETRY": "1"}
    try:
        done = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        output = (error.output or b"").decode(errors="replace")
        raise FailedError(f"{client.name}: not over in {timeout_s:g} s\n{output}") from error
    if done.returncode != 0:
        output = done.stdout.decode(errors="replace")
        raise FailedError(f"{client.name}: exit status {done.returncode}\n{output}")


if __name__ == "__main__":
    sys.exit(main())

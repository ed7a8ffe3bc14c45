"""Engine as a library: it needs no broker and no HTTP server, and leaves nothing behind."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from millrace.engine import LLM, SamplingParams
from tests.engine.test_llm import GREEDY, SMALL
from tests.support.engine.checkpoints_made import write_checkpoint
from tests.support.engine.warm_fixture import warm_processes as warm_processes

# Blocks what only the services need, then runs all that a library is for.
_SCRIPT = """
import json, sys

BLOCKED = ("nats", "redis", "aiokafka", "clickhouse_connect", "starlette")

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Block())

import millrace.engine.types
assert "millrace.engine.llm" not in sys.modules, "a module of the engine imports the face"
from millrace.engine import LLM, Grammar, SamplingParams
assert "torch" not in sys.modules, "the face imports torch before it has chosen threads"

with LLM(sys.argv[1], device="cpu", num_threads=1, num_blocks=64) as llm:
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    word = SamplingParams(max_tokens=20, grammar=Grammar.choice(["yes", "no"]))
    print(json.dumps({
        "generated": llm.generate("mill wheel", params)[0].token_ids,
        "streamed": [t for delta in llm.stream("mill wheel", params) for t in delta.token_ids],
        "chat": len(llm.chat([{"role": "user", "content": "Hi"}], params)[0].token_ids),
        "word": llm.generate("a", word)[0].text in ("yes", "no"),
        "embedded": len(llm.embed("mill", pooling="mean")[0].embedding),
        "services": [
            name for name in sys.modules
            if name.startswith(("millrace.bus", "millrace.workers", "millrace.gateway",
                                "millrace.scheduler", "millrace.telemetry"))
        ],
    }))
"""


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore the environment, which LLM sets for its process."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")


def test_engine_runs_without_brokers_and_servers(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "tiny")
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, str(checkpoint)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    with LLM(checkpoint, **SMALL) as llm:
        tokens = list(llm.generate("mill wheel", SamplingParams.of(GREEDY))[0].token_ids[:4])
    assert found == {
        "generated": tokens,
        "streamed": tokens,
        "chat": 4,
        "word": True,
        "embedded": 32,
        "services": [],
    }


@pytest.mark.usefixtures("warm_processes")
def test_close_ends_the_other_ranks(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "tiny")
    with LLM(checkpoint, **SMALL) as llm:
        alone = llm.generate("mill wheel", GREEDY)
    before = set(psutil.Process().children())
    llm = LLM(checkpoint, tensor_parallel=2, **SMALL)
    ranks = set(psutil.Process().children()) - before
    assert ranks
    assert llm.generate("mill wheel", GREEDY)[0].token_ids == alone[0].token_ids
    llm.close()
    assert not [rank for rank in ranks if rank.is_running() and rank.status() != "zombie"]

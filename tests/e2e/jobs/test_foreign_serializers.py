"""Jobs that serializers of JavaScript, Go and Java have written."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.clients.packages import installed, need
from tests.e2e.jobs.scribe_system import MODEL, TENANT, ScribeSystem

SOURCES = Path(__file__).parent / "serializers"
CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
# What the three have written, byte for byte.
RECORDED = {
    "js": bytes.fromhex(
        "8caa726571756573745f6964a766726f6d2d6a73a56d6f64656ca464656d6fa57265706c79a56c6f63616cac"
        "73746f72655f726573756c74c3ab646561646c696e655f6e73cb43cbc16d674ec800a761646170746572c0a8"
        "6d657373616765739183a4726f6c65a475736572a7636f6e74656e74a26869a46e616d65c0a5746f6f6c7391"
        "82a474797065a866756e6374696f6ea866756e6374696f6e83a46e616d65a166ab6465736372697074696f6e"
        "c0aa706172616d657465727382a474797065a66f626a656374aa70726f7065727469657380ab746f6f6c5f63"
        "686f696365a46175746fb56d61785f636f6d706c6574696f6e5f746f6b656e733caa6c6f6769745f62696173"
        "81a135cb3ff8000000000000a473656564cb4340000000000000"
    ),
    "go": (
        b'{"request_id":"from-go","model":"demo","reply":"local","store_result":true,"dead'
        b'line":"2096-11-28T12:00:00.123456789Z","tier":null,"messages":[{"role":"user","c'
        b'ontent":"hi","name":null,"tool_calls":null,"tool_call_id":null}],"tools":[{"type'
        b'":"function","function":{"name":"f","description":null,"parameters":{"properties'
        b'":{},"type":"object"},"strict":null}}],"tool_choice":null,"max_tokens":60,"stop"'
        b':null,"metadata":null,"logit_bias":null,"seed":null}\n'
    ),
    "java": (
        b'{"request_id":"from-java","model":"demo","reply":"local","store_result":true,"de'
        b'adline_ns":4.0E18,"traceparent":null,"messages":[{"role":"user","content":"hi","'
        b'name":null}],"tools":[{"type":"function","custom":null,"function":{"name":"f","p'
        b'arameters":{"type":"object","properties":{},"maxProperties":3.0}}}],"tool_choice'
        b'":null,"max_tokens":60.0,"temperature":1.0,"stop":null,"response_format":null}'
    ),
}


async def is_answered(scribe: ScribeSystem, payload: bytes, request_id: str) -> None:
    """Publish the bytes as they are, without a header; the job is run with all that it says."""
    scribe.script.text = CALL
    scribe.bus.jobs.publish_raw(  # type: ignore[attr-defined]
        f"jobs.{MODEL}.free.{TENANT}", payload, None, request_id
    )
    result = await scribe.result(request_id)
    assert (result.status, result.error_message) == ("done", "")
    assert [call.function.name for call in result.tool_calls if call.function] == ["f"]
    sampling = scribe.script.requests[-1].sampling
    assert sampling.max_tokens == 60


@pytest.mark.parametrize("language", RECORDED)
async def test_recorded_jobs_are_run(scribe: ScribeSystem, language: str) -> None:
    await is_answered(scribe, RECORDED[language], f"from-{language}")


@pytest.mark.slow(reason="three runtimes start, and their packages are installed once")
async def test_jobs_are_run(scribe: ScribeSystem) -> None:
    written = {"js": _by_node(), "go": _by_go(), "java": _by_java()}
    assert written == RECORDED
    for language, payload in written.items():
        await is_answered(scribe, payload, f"from-{language}")


def _by_node() -> bytes:
    need("npm", "node")
    folder = installed(
        "msgpack-js",
        (SOURCES / "job.mjs",),
        ("npm", "init", "--yes", "--silent"),
        ("npm", "install", "--silent", "--no-audit", "--no-fund", "@msgpack/msgpack@3.1.2"),
    )
    return _output(folder, "node", "job.mjs")


def _by_go() -> bytes:
    need("go")
    folder = installed(
        "go-json", (SOURCES / "go" / "job.go",), ("nice", "go", "build", "-o", "job", "job.go")
    )
    return _output(folder, "./job")


def _by_java() -> bytes:
    need("mvn", "java")
    sources = (SOURCES / "java" / "pom.xml", SOURCES / "java" / "Job.java")
    copy = ("mvn", "--quiet", "--batch-mode", "dependency:copy-dependencies")
    folder = installed("gson", sources, copy)
    return _output(folder, "java", "-cp", "target/dependency/*", "Job.java")


def _output(folder: Path, *command: str) -> bytes:
    done = subprocess.run(command, cwd=folder, capture_output=True, check=True, timeout=60)
    return done.stdout

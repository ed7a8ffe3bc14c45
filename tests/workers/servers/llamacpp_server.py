"""llama.cpp's server, started outside of an engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from millrace.registry.served import ServedModel
from millrace.workers.servers.server_process import find_program
from tests.support.servers import free_port


@asynccontextmanager
async def llamacpp_server(
    model: ServedModel, folder: Path, *arguments: str
) -> AsyncIterator[tuple[str, asyncio.subprocess.Process]]:
    """Start llama.cpp's server, and yield its URL and its process. It has two slots of 128 tokens
    unless ``arguments`` say otherwise."""
    port = free_port()
    process = await asyncio.create_subprocess_exec(
        str(find_program("llama-server", "", "llama.cpp")),
        *("--model", model.entry.source, "--host", "127.0.0.1", "--port", str(port), "--slots"),
        *("--parallel", "2", "--ctx-size", "256", "--threads", "1", "--no-kv-unified", "--metrics"),
        *arguments,
        cwd=folder,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        yield f"http://127.0.0.1:{port}", process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()

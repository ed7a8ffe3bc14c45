"""Process that has imported the kernel compilers and forks itself for each run."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_ROOT = Path(__file__).parents[3]


class CompilingProcess:
    """Process that forks itself for each run: a run may pretend to have a GPU, for example."""

    def __init__(self, process: subprocess.Popen[str], folder: Path) -> None:
        self._process = process
        self._folder = folder

    def run(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        """Run ``python`` with these arguments: ``-m`` and a module, or a script."""
        texts = [str(argument) for argument in arguments]
        files = [str(self._folder / name) for name in ("stdout", "stderr")]
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([texts, files]) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the compiling process ended"
        stdout, stderr = (Path(file).read_text() for file in files)
        return subprocess.CompletedProcess(texts, int(answer), stdout, stderr)


@contextmanager
def compiling_process(folder: Path, compiled: Path) -> Iterator[CompilingProcess]:
    """Start a process with its files in ``folder`` and Triton's cache in ``compiled``.

    No run compiles a kernel that another run has compiled: Triton finds it by a hash of the source
    of the kernel and of the functions that it calls, of the options and of the compiler. Tests
    count launches of other variants, which are the same with and without the cache.
    """
    environment = os.environ | {"TRITON_CACHE_DIR": str(compiled), "PYTHONPATH": str(_ROOT)}
    environment.pop("TRITON_INTERPRET", None)
    with subprocess.Popen(
        [sys.executable, "-m", __name__],
        env=environment,
        cwd=_ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield CompilingProcess(process, folder)
        finally:
            process.kill()


def _run(arguments: list[str]) -> int:
    """The exit code."""
    try:
        if arguments[0] == "-m":
            sys.argv = arguments[1:]
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = arguments
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except Exception:  # noqa: BLE001 (as Python itself ends)
        traceback.print_exc()
        return 1
    return 0


def _main() -> None:
    from benchmarks.gpu_compile import (  # noqa: F401
        adapters,
        compiling,
        engine,
        quantized,
        steps,
    )

    for line in sys.stdin:
        arguments, files = json.loads(line)
        child = os.fork()
        if child:
            _, status = os.waitpid(child, 0)
            sys.stdout.write(f"{os.waitstatus_to_exitcode(status)}\n")
            sys.stdout.flush()
            continue
        for number, file in enumerate(files, 1):
            os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), number)
        code = _run(arguments)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _main()

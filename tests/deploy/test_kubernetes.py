"""The manifests cannot be applied here; what they say of us is held to what we do."""

from __future__ import annotations

import re
from typing import Any

import httpx
import pytest
import yaml

from millrace.runtime.settings import load_config
from millrace.schemas.config import Config
from millrace.schemas.control import QueueStatus
from millrace.schemas.engines import check_parallel
from millrace.schemas.jobs import Tier
from tests.support.repository import ROOT
from tests.support.running_gateway import running_gateway

FOLDER = ROOT / "deploy" / "kubernetes"


def _manifest(name: str) -> dict[str, Any]:
    tree = yaml.safe_load((FOLDER / name).read_text())
    assert isinstance(tree, dict)
    return tree


def _group_manifests() -> tuple[dict[str, Any], dict[str, Any]]:
    """What runs a group of devices, and what scales it."""
    worker, scaled = yaml.safe_load_all((FOLDER / "worker-group.yaml").read_text())
    return worker, scaled


@pytest.fixture(scope="module", params=["one device", "group"])
def manifests(request: pytest.FixtureRequest) -> tuple[dict[str, Any], dict[str, Any]]:
    if request.param == "group":
        return _group_manifests()
    return _manifest("worker.yaml"), _manifest("keda.yaml")


@pytest.fixture(scope="module")
def worker(manifests: tuple[dict[str, Any], dict[str, Any]]) -> dict[str, Any]:
    return manifests[0]


@pytest.fixture(scope="module")
def scaled(manifests: tuple[dict[str, Any], dict[str, Any]]) -> dict[str, Any]:
    return manifests[1]


def _container(worker: dict[str, Any]) -> dict[str, Any]:
    [container] = worker["spec"]["template"]["spec"]["containers"]
    assert isinstance(container, dict)
    return container


def _settings(worker: dict[str, Any]) -> Config:
    env = {one["name"]: one.get("value", "a-pod") for one in _container(worker)["env"]}
    return load_config(None, env)


async def _metrics(model: str) -> str:
    """Of a gateway that has heard of the model's queue."""
    async with running_gateway() as front, httpx.AsyncClient(base_url=front.url) as http:
        status = QueueStatus(
            model=model,
            num_queued=1,
            bound=10,
            desired_workers=2,
            oldest_wait_s=0.5,
            ttft_ms={Tier.FREE: 100.0},
        )
        front.gateway.fleet.on_queue(status)
        return (await http.get("/metrics")).text


async def test_the_query_and_the_document_name_what_gateways_tell(scaled: dict[str, Any]) -> None:
    [trigger] = scaled["spec"]["triggers"]
    [series] = re.findall(r"millrace_\w+\{[^}]*\}", trigger["metadata"]["query"])
    told = await _metrics(series.split('"')[1])
    assert f"\n{series} 2.0\n" in told
    document = (ROOT / "docs" / "autoscaling.md").read_text()
    described = re.findall(r"^\| `(millrace_\w+)\{([\w,]+)\}`", document, re.MULTILINE)
    assert len(described) == 4
    for name, labels in described:
        pattern = ",".join(f'{label}="[^"]+"' for label in labels.split(","))
        assert re.search(rf"^{name}\{{{pattern}\}} ", told, re.MULTILINE), name


def test_what_is_scaled_is_the_worker_of_that_model(
    worker: dict[str, Any], scaled: dict[str, Any]
) -> None:
    assert scaled["spec"]["scaleTargetRef"]["name"] == worker["metadata"]["name"]
    [trigger] = scaled["spec"]["triggers"]
    model = _settings(worker).worker.model
    assert f'model="{model}"' in trigger["metadata"]["query"]
    assert worker["metadata"]["labels"]["millrace/model"] == model
    # Whoever applies the manifests again must not undo what KEDA has done.
    assert "replicas" not in worker["spec"]


def test_one_replica_is_one_worker_that_is_wanted(scaled: dict[str, Any]) -> None:
    [trigger] = scaled["spec"]["triggers"]
    assert trigger["metricType"] == "AverageValue"
    assert trigger["metadata"]["threshold"] == "1"
    assert trigger["metadata"]["activationThreshold"] == "0"
    assert trigger["metadata"]["ignoreNullValues"] == "false"


def test_the_schedulers_are_told_the_same_bounds(scaled: dict[str, Any]) -> None:
    said = re.findall(
        r"^#   (MILLRACE_\w+)=(\S+)$", (FOLDER / "keda.yaml").read_text(), re.MULTILINE
    )
    autoscale = load_config(None, dict(said)).scheduler.autoscale
    assert autoscale.min_workers == scaled["spec"]["minReplicaCount"]
    assert autoscale.max_workers == scaled["spec"]["maxReplicaCount"]


def test_a_worker_has_as_many_devices_as_its_engine_has_ranks(worker: dict[str, Any]) -> None:
    num_devices = int(_container(worker)["resources"]["limits"]["nvidia.com/gpu"])
    engine = _settings(worker).worker.engine
    assert num_devices == engine.tensor_parallel
    check_parallel(engine.tensor_parallel, 1, engine.expert_parallel, engine.kind)


def test_groups_are_scaled_as_single_devices_are() -> None:
    """But for which model it is."""
    _, group = _group_manifests()
    single = yaml.safe_dump(_manifest("keda.yaml")["spec"])
    assert single.replace("demo", "large") == yaml.safe_dump(group["spec"])


def test_the_ranks_of_a_group_have_shared_memory() -> None:
    worker, _ = _group_manifests()
    [mount] = _container(worker)["volumeMounts"]
    [volume] = worker["spec"]["template"]["spec"]["volumes"]
    assert (mount["mountPath"], mount["name"]) == ("/dev/shm", volume["name"])
    assert volume["emptyDir"]["medium"] == "Memory"


def test_a_worker_is_given_the_time_to_drain(worker: dict[str, Any]) -> None:
    grace_s = worker["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    # Giving back what is left and saying goodbye are a second each.
    assert grace_s >= _settings(worker).worker.drain_timeout_s + 5


def test_the_container_runs_a_part_of_ours(worker: dict[str, Any]) -> None:
    container = _container(worker)
    [module] = container["args"]
    assert (ROOT / module.replace(".", "/") / "__main__.py").is_file()
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    assert container["image"] == compose["x-millrace"]["image"]
    selector = worker["spec"]["selector"]["matchLabels"]
    assert worker["spec"]["template"]["metadata"]["labels"].items() >= selector.items()


def test_prometheus_and_the_kubelet_find_where_a_worker_shows_itself(
    worker: dict[str, Any],
) -> None:
    metrics = _settings(worker).metrics
    assert metrics.host == "0.0.0.0"
    assert metrics.token
    template = worker["spec"]["template"]
    annotations = template["metadata"]["annotations"]
    assert annotations == {
        "prometheus.io/scrape": "true",
        "prometheus.io/port": str(metrics.port),
        "prometheus.io/path": "/metrics",
    }
    container = _container(worker)
    [port] = container["ports"]
    assert port["containerPort"] == metrics.port
    probe = container["readinessProbe"]["httpGet"]
    assert (probe["path"], probe["port"]) == ("/healthz", port["name"])

"""Kubernetes manifests, compared with the settings and metrics of the parts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from millrace.cli.main import build_parser
from millrace.engine.parallel.layout import check_remote_stages
from millrace.engine.transfer.addresses import host_and_port
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


def _group_manifests(name: str = "worker-group.yaml") -> tuple[dict[str, Any], dict[str, Any]]:
    """Read the manifests of a device group and of its scaler."""
    worker, scaled = yaml.safe_load_all((FOLDER / name).read_text())
    return worker, scaled


@pytest.fixture(scope="module", params=[None, "worker-group.yaml", "worker-stages.yaml"], ids=str)
def manifests(request: pytest.FixtureRequest) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the manifests of single-device workers, of groups in a pod, and of groups of pods."""
    if request.param is not None:
        return _group_manifests(request.param)
    return _manifest("worker.yaml"), _manifest("keda.yaml")


@pytest.fixture(scope="module")
def worker(manifests: tuple[dict[str, Any], dict[str, Any]]) -> dict[str, Any]:
    return manifests[0]


@pytest.fixture(scope="module")
def scaled(manifests: tuple[dict[str, Any], dict[str, Any]]) -> dict[str, Any]:
    return manifests[1]


def _template(worker: dict[str, Any], name: str = "leaderTemplate") -> dict[str, Any]:
    """Return the template of the worker's pod, or of another pod of its group."""
    spec = worker["spec"]
    template = spec["template"] if "template" in spec else spec["leaderWorkerTemplate"][name]
    assert isinstance(template, dict)
    return template


def _container(template: dict[str, Any]) -> dict[str, Any]:
    [container] = template["spec"]["containers"]
    assert isinstance(container, dict)
    return container


def _env(worker: dict[str, Any]) -> dict[str, str]:
    return {one["name"]: one.get("value", "a-pod") for one in _container(_template(worker))["env"]}


def _pods(tree: Any) -> list[dict[str, Any]]:
    """Return the specification of every pod in a manifest."""
    if isinstance(tree, list):
        return [pod for one in tree for pod in _pods(one)]
    if not isinstance(tree, dict):
        return []
    return ([tree] if "containers" in tree else []) + _pods(list(tree.values()))


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.yaml")), ids=lambda file: file.name)
def test_no_pod_gets_the_variables_of_services(file: Path) -> None:
    pods = _pods(list(yaml.safe_load_all(file.read_text())))
    assert pods or file.name == "keda.yaml"
    assert all(pod["enableServiceLinks"] is False for pod in pods)


def _settings(worker: dict[str, Any]) -> Config:
    """Return the settings of the manifest; a mounted file contains its own name."""
    return load_config(
        None, {name.removesuffix("_FILE"): value for name, value in _env(worker).items()}
    )


async def _metrics(model: str) -> str:
    """Return the metrics of a gateway that knows the model's queue."""
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


def test_scaler_targets_the_worker_of_its_model(
    worker: dict[str, Any], scaled: dict[str, Any]
) -> None:
    assert scaled["spec"]["scaleTargetRef"]["name"] == worker["metadata"]["name"]
    [trigger] = scaled["spec"]["triggers"]
    model = _settings(worker).worker.model
    assert f'model="{model}"' in trigger["metadata"]["query"]
    assert worker["metadata"]["labels"]["millrace/model"] == model
    # Another application of the manifests must not undo KEDA's scaling.
    assert "replicas" not in worker["spec"]


def test_one_replica_is_one_desired_worker(scaled: dict[str, Any]) -> None:
    [trigger] = scaled["spec"]["triggers"]
    assert trigger["metricType"] == "AverageValue"
    assert trigger["metadata"]["threshold"] == "1"
    assert trigger["metadata"]["activationThreshold"] == "0"
    assert trigger["metadata"]["ignoreNullValues"] == "false"


def test_the_schedulers_are_told_the_same_bounds(scaled: dict[str, Any]) -> None:
    variables = re.findall(
        r"^#   (MILLRACE_\w+)=(\S+)$", (FOLDER / "keda.yaml").read_text(), re.MULTILINE
    )
    autoscale = load_config(None, dict(variables)).scheduler.autoscale
    assert autoscale.min_workers == scaled["spec"]["minReplicaCount"]
    assert autoscale.max_workers == scaled["spec"]["maxReplicaCount"]


def test_a_worker_has_as_many_devices_as_its_engine_has_ranks(worker: dict[str, Any]) -> None:
    num_devices = int(_container(_template(worker))["resources"]["limits"]["nvidia.com/gpu"])
    engine = _settings(worker).worker.engine
    assert num_devices == engine.tensor_parallel
    check_parallel(engine.tensor_parallel, 1, engine.expert_parallel, engine.kind)


@pytest.mark.parametrize(
    ("name", "model"), [("worker-group.yaml", "large"), ("worker-stages.yaml", "huge")]
)
def test_groups_are_scaled_as_single_devices_are(name: str, model: str) -> None:
    """The scaler of a group equals that of single devices, except for model and target."""
    worker, group = _group_manifests(name)
    target = group["spec"]["scaleTargetRef"]
    assert target.get("kind", "Deployment") == worker["kind"]
    assert target.get("apiVersion", "apps/v1") == worker["apiVersion"]
    single = _manifest("keda.yaml")["spec"]
    text = yaml.safe_dump(single | {"scaleTargetRef": target})
    assert text.replace("demo", model) == yaml.safe_dump(group["spec"])


def test_a_group_of_pods_has_one_for_each_stage() -> None:
    """Every other pod of the group joins the worker at its address, has the settings that it needs,
    and outlasts the worker's drain."""
    worker, _ = _group_manifests("worker-stages.yaml")
    group = worker["spec"]["leaderWorkerTemplate"]
    settings = _settings(worker).worker
    engine = settings.engine
    assert engine.pipeline_parallel == group["size"]
    assert engine.remote_stages == group["size"] - 1
    check_remote_stages(engine)
    leader, template = _template(worker), _template(worker, "workerTemplate")
    first, other = _container(leader), _container(template)
    program, command, *options = other["args"]
    arguments = build_parser().parse_args([command, *options])
    _, port = host_and_port(engine.stages_address, "")
    assert (program, command, arguments.max_stages) == ("millrace", "stages", 1)
    assert arguments.join == f"$(LWS_LEADER_ADDRESS):{port}"
    assert port in [one["containerPort"] for one in first["ports"]]
    assert str(arguments.token_file) == _env(worker)["MILLRACE_WORKER__ENGINE__STAGES_TOKEN_FILE"]
    for name in ("image", "volumeMounts", "resources"):
        assert other[name] == first[name]
    mounted = {mount["name"]: mount["mountPath"] for mount in first["volumeMounts"]}
    assert mounted.keys() == {volume["name"] for volume in template["spec"]["volumes"]}
    assert arguments.token_file.parent == Path(mounted["token"])
    # The worker is not ready before its stages have joined.
    assert worker["spec"]["startupPolicy"] == "LeaderCreated"
    waits, seconds = other["lifecycle"]["preStop"]["exec"]["command"]
    assert waits == "sleep"
    assert int(seconds) >= settings.drain_timeout_s + 5
    assert template["spec"]["terminationGracePeriodSeconds"] > int(seconds)


def test_the_ranks_of_a_group_have_shared_memory() -> None:
    worker, _ = _group_manifests()
    [mount] = _container(_template(worker))["volumeMounts"]
    [volume] = _template(worker)["spec"]["volumes"]
    assert (mount["mountPath"], mount["name"]) == ("/dev/shm", volume["name"])
    assert volume["emptyDir"]["medium"] == "Memory"


def test_a_worker_is_given_the_time_to_drain(worker: dict[str, Any]) -> None:
    grace_s = _template(worker)["spec"]["terminationGracePeriodSeconds"]
    # The return of unfinished jobs takes a second, and so does the farewell.
    assert grace_s >= _settings(worker).worker.drain_timeout_s + 5


def test_the_container_runs_a_part_of_ours(worker: dict[str, Any]) -> None:
    template = _template(worker)
    container = _container(template)
    [module] = container["args"]
    assert (ROOT / module.replace(".", "/") / "__main__.py").is_file()
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    assert container["image"] == compose["x-millrace"]["image"]
    # Of a LeaderWorkerSet it is the controller's own.
    selector = worker["spec"].get("selector", {"matchLabels": worker["metadata"]["labels"]})
    assert template["metadata"]["labels"].items() >= selector["matchLabels"].items()


def test_prometheus_and_the_kubelet_find_where_a_worker_shows_itself(
    worker: dict[str, Any],
) -> None:
    metrics = _settings(worker).metrics
    assert metrics.host == "0.0.0.0"
    assert metrics.token
    template = _template(worker)
    annotations = template["metadata"]["annotations"]
    assert annotations == {
        "prometheus.io/scrape": "true",
        "prometheus.io/port": str(metrics.port),
        "prometheus.io/path": "/metrics",
    }
    container = _container(template)
    port = container["ports"][0]
    assert port["containerPort"] == metrics.port
    probe = container["readinessProbe"]["httpGet"]
    assert (probe["path"], probe["port"]) == ("/healthz", port["name"])

"""The manifests are valid, and agree with one another, with the images and with the settings."""

from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from shared.curve import client_keys, make_keys, server_keys
from shared.links import check_endpoint
from shared.settings import ExecutorSettings, GatewaySettings, SchedulerSettings, load

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "ops/k8s"
VERSION = "1.33"
MANIFESTS = [
    manifest
    for path in sorted(FOLDER.glob("*.yaml"))
    if path.name != "kustomization.yaml"
    for manifest in yaml.safe_load_all(path.read_text())
]
SETTINGS = {
    "gateway": GatewaySettings, "scheduler": SchedulerSettings, "executor": ExecutorSettings,
}  # fmt: skip
PARTS = list(SETTINGS)


def named(kind, name):
    (found,) = [it for it in MANIFESTS if (it["kind"], it["metadata"]["name"]) == (kind, name)]
    return found


def workload(part):
    return named("Deployment" if part == "gateway" else "StatefulSet", part)["spec"]


def pod(part):
    return workload(part)["template"]["spec"]


def labels(part):
    return workload(part)["template"]["metadata"]["labels"]


def container(part):
    (only,) = pod(part)["containers"]
    return only


def ports(part):
    return {port["name"]: port["containerPort"] for port in container(part)["ports"]}


def dockerfile(part):
    return (ROOT / f"ops/docker/{part}.Dockerfile").read_text()


def settings_of(part, monkeypatch):
    """What its process is told: by its image, the config map and its arguments."""
    monkeypatch.setenv("SPLITFLAP_METRICS_PORT", "9100")
    for name, value in named("ConfigMap", "splitflap-settings")["data"].items():
        monkeypatch.setenv(name, value)
    return load(SETTINGS[part], container(part)["args"], part)


@pytest.mark.parametrize(
    "manifest", MANIFESTS, ids=lambda it: f"{it['kind']}-{it['metadata']['name']}"
)
def test_a_manifest_is_valid(manifest):
    kubernetes_validate.validate(manifest, VERSION, strict=True)


def test_a_manifest_that_is_not_is_found():
    wrong = {**named("Service", "splitflap"), "sepc": {}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, VERSION, strict=True)


def test_kustomize_takes_every_file_and_names_every_image():
    told = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())
    assert set(told["resources"]) == {path.name for path in FOLDER.glob("*.yaml")} - {
        "kustomization.yaml"
    }
    assert {image["name"] for image in told["images"]} == {container(it)["image"] for it in PARTS}


@pytest.mark.parametrize("part", PARTS)
def test_a_workload_finds_its_own_pods_alone(part):
    assert workload(part)["selector"]["matchLabels"] == labels(part)
    assert labels(part)["part"] == part


def test_services_and_policies_name_pods_and_ports_that_are_there():
    for service in [it["spec"] for it in MANIFESTS if it["kind"] == "Service"]:
        part = service["selector"]["part"]
        assert service["selector"] == labels(part)
        assert {port["targetPort"] for port in service["ports"]} <= set(ports(part))
    for part in PARTS:
        policy = named("NetworkPolicy", part)["spec"]
        assert policy["podSelector"]["matchLabels"] == labels(part)
        opened = {port["port"] for rule in policy.get("ingress", ()) for port in rule["ports"]}
        assert opened <= set(ports(part))
    budget = named("PodDisruptionBudget", "gateway")["spec"]
    assert budget["selector"]["matchLabels"] == labels("gateway")


def test_what_may_go_out_may_come_in():
    """The links: who connects has a way out, and the scheduler a way in, to the same port."""
    let_in = {
        (rule["from"][0]["podSelector"]["matchLabels"]["part"], rule["ports"][0]["port"])
        for rule in named("NetworkPolicy", "scheduler")["spec"]["ingress"]
    }
    assert let_in == {("gateway", "requests"), ("executor", "steps")}
    for part, port in let_in:
        egress = named("NetworkPolicy", part)["spec"]["egress"]
        (out,) = [rule for rule in egress if "to" in rule]
        assert out["to"][0]["podSelector"]["matchLabels"] == labels("scheduler")
        assert out["ports"] == [{"protocol": "TCP", "port": ports("scheduler")[port]}]


def test_gateway_scheduler_and_executor_meet(monkeypatch):
    gateway, scheduler, executor = (settings_of(part, monkeypatch) for part in PARTS)
    requests, steps = ports("scheduler")["requests"], ports("scheduler")["steps"]
    assert (gateway.request_endpoint, executor.step_endpoint) == (
        f"tcp://scheduler:{requests}", f"tcp://scheduler:{steps}",
    )  # fmt: skip
    assert (scheduler.request_endpoint, scheduler.step_endpoint) == (
        f"tcp://*:{requests}", f"tcp://*:{steps}",
    )  # fmt: skip
    assert named("Service", "scheduler")["spec"]["publishNotReadyAddresses"]


@pytest.mark.parametrize("part", PARTS)
def test_a_pod_has_the_keys_that_its_process_wants_and_no_others(part, tmp_path, monkeypatch):
    made = {path.name: path for path in make_keys(tmp_path / "made")}
    (secret,) = [it["secret"] for it in pod(part)["volumes"] if it["name"] == "links"]
    mounted = tmp_path / "mounted"
    mounted.mkdir()
    for item in secret["items"]:
        (mounted / item["path"]).write_bytes(made[item["key"]].read_bytes())
        (mounted / item["path"]).chmod(secret["defaultMode"])
    if part == "scheduler":
        assert server_keys(mounted, "gateway")
        assert server_keys(mounted, "executor")
    else:
        assert client_keys(mounted, part)
    assert [path.name for path in mounted.glob("*.secret")] == [f"{part}.secret"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container(part)["volumeMounts"]}
    assert settings_of(part, monkeypatch).curve_key_dir == Path(mounts["links"])


@pytest.mark.parametrize("part", PARTS)
def test_settings_of_a_pod_are_taken(part, monkeypatch):
    settings = settings_of(part, monkeypatch)
    assert settings.metrics_port == ports(part)["metrics"]
    for flag in {"request_endpoint", "step_endpoint"} & set(type(settings).model_fields):
        check_endpoint(getattr(settings, flag), flag, has_keys=True)
    assert pod(part)["enableServiceLinks"] is False, "SPLITFLAP_PORT=tcp://... is no setting"


@pytest.mark.parametrize("part", PARTS)
def test_what_an_image_writes_to_is_a_volume(part):
    mounts = {mount["mountPath"] for mount in container(part)["volumeMounts"]}
    (volumes,) = [line for line in dockerfile(part).splitlines() if line.startswith("VOLUME ")]
    needed = set(volumes.split()[1:]) - {"/run/splitflap"}  # sockets, where the links have no tcp
    assert needed | {"/tmp"} <= mounts


def test_open_streams_get_their_time_to_finish(monkeypatch):
    wait_s = int(container("gateway")["lifecycle"]["preStop"]["exec"]["command"][1])
    drained_s = wait_s + settings_of("gateway", monkeypatch).shutdown_timeout
    assert pod("gateway")["terminationGracePeriodSeconds"] > drained_s


@pytest.mark.parametrize("part", PARTS)
def test_a_pod_has_no_more_power_than_it_needs(part):
    told = container(part)["securityContext"]
    assert told["readOnlyRootFilesystem"]
    assert not told["allowPrivilegeEscalation"]
    assert told["capabilities"] == {"drop": ["ALL"]}
    user = pod(part)["securityContext"]
    assert user["runAsNonRoot"]
    assert f"USER {user['runAsUser']}:{user['runAsGroup']}\n" in dockerfile(part)
    assert not pod(part)["automountServiceAccountToken"]
    assert "livenessProbe" in container(part)

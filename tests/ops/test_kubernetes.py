"""The manifests are valid, and say what the images and the settings say."""

from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from shared.links import check_endpoint
from shared.settings import ExecutorSettings, GatewaySettings, SchedulerSettings, load

FOLDER = Path(__file__).parents[2] / "ops/k8s"
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


def of_kind(kind):
    return [manifest for manifest in MANIFESTS if manifest["kind"] == kind]


def pod():
    (stateful_set,) = of_kind("StatefulSet")
    return stateful_set["spec"]["template"]["spec"]


def containers():
    return {container["name"]: container for container in pod()["containers"]}


def settings_of(name, monkeypatch):
    monkeypatch.setenv("SPLITFLAP_METRICS_PORT", "9100")  # as the images have it
    return load(SETTINGS[name], containers()[name]["args"], name)


@pytest.mark.parametrize(
    "manifest", MANIFESTS, ids=lambda it: f"{it['kind']}-{it['metadata']['name']}"
)
def test_a_manifest_is_valid(manifest):
    kubernetes_validate.validate(manifest, VERSION, strict=True)


def test_kustomize_takes_every_file():
    listed = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())["resources"]
    assert set(listed) == {path.name for path in FOLDER.glob("*.yaml")} - {"kustomization.yaml"}


def test_a_selector_finds_the_pod():
    labels = of_kind("StatefulSet")[0]["spec"]["template"]["metadata"]["labels"]
    for service in of_kind("Service"):
        assert service["spec"]["selector"].items() <= labels.items()
    (policy,), (budget,) = of_kind("NetworkPolicy"), of_kind("PodDisruptionBudget")
    assert policy["spec"]["podSelector"]["matchLabels"].items() <= labels.items()
    assert budget["spec"]["selector"]["matchLabels"].items() <= labels.items()


def test_ports_that_are_named_are_there():
    there = {port["name"] for each in containers().values() for port in each["ports"]}
    named = {
        port["targetPort"] for service in of_kind("Service") for port in service["spec"]["ports"]
    }
    for rule in of_kind("NetworkPolicy")[0]["spec"]["ingress"]:
        named |= {port["port"] for port in rule["ports"]}
    assert named <= there


@pytest.mark.parametrize("name", SETTINGS)
def test_a_container_is_started_with_settings_that_it_takes(name, monkeypatch):
    settings = settings_of(name, monkeypatch)
    ports = {port["name"]: port["containerPort"] for port in containers()[name]["ports"]}
    assert settings.metrics_port in ports.values()
    for flag in ("request_endpoint", "step_endpoint"):
        if hasattr(settings, flag):
            check_endpoint(getattr(settings, flag), flag)


def test_containers_of_a_pod_share_a_network_and_so_have_ports_of_their_own(monkeypatch):
    ports = [settings_of(name, monkeypatch).metrics_port for name in SETTINGS]
    assert len(set(ports)) == len(ports)


def test_gateway_scheduler_and_executor_meet(monkeypatch):
    gateway, scheduler, executor = (settings_of(name, monkeypatch) for name in SETTINGS)
    assert gateway.request_endpoint == scheduler.request_endpoint
    assert executor.step_endpoint == scheduler.step_endpoint


def test_open_streams_get_their_time_to_finish(monkeypatch):
    waits_s = {
        name: int(each["lifecycle"]["preStop"]["exec"]["command"][1])
        for name, each in containers().items()
    }
    drained_s = waits_s["gateway"] + settings_of("gateway", monkeypatch).shutdown_timeout
    assert min(waits_s["scheduler"], waits_s["executor"]) > drained_s
    assert pod()["terminationGracePeriodSeconds"] > max(waits_s.values())


@pytest.mark.parametrize("name", SETTINGS)
def test_a_container_has_no_more_power_than_it_needs(name):
    told = containers()[name]["securityContext"]
    assert told["readOnlyRootFilesystem"]
    assert not told["allowPrivilegeEscalation"]
    assert told["capabilities"] == {"drop": ["ALL"]}
    assert pod()["securityContext"]["runAsNonRoot"]
    assert "livenessProbe" in containers()[name]

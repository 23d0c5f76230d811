"""Prometheus, its alerts and the dashboard name metrics that there are."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

import services.gateway.gauges  # noqa: F401 - a gateway's metrics are in the registry then
from services.scheduler.gauges import SchedulerCollector
from shared.metrics import PREFIX, REGISTRY
from tests.scheduler.world import World

ROOT = Path(__file__).parents[2]
PROMETHEUS = ROOT / "ops/prometheus"
ALERTS = yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())
DASHBOARD = json.loads((ROOT / "ops/grafana/dashboards/splitflap.json").read_text())
DATASOURCES = yaml.safe_load(
    (ROOT / "ops/grafana/provisioning/datasources/prometheus.yml").read_text()
)
SUFFIXES = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"], "gauge": [""]}


@pytest.fixture
async def families(tmp_path):
    """Every family of metrics that some process of ours has."""
    world = World(tmp_path)
    try:
        return [*SchedulerCollector(world.server).collect(), *REGISTRY.collect()]
    finally:
        await world.close()


def alert_expressions():
    return [rule["expr"] for group in ALERTS["groups"] for rule in group["rules"]]


def panels():
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def dashboard_expressions():
    return [target["expr"] for panel in panels() for target in panel["targets"]]


def names_in(expressions):
    return set(re.findall(rf"{PREFIX}\w+", " ".join(expressions)))


def sample_names(families):
    return {family.name + suffix for family in families for suffix in SUFFIXES[family.type]}


async def test_every_metric_of_an_alert_is_one_that_a_process_has(families):
    assert names_in(alert_expressions()) - sample_names(families) == set()


async def test_every_metric_of_the_dashboard_is_one_that_a_process_has(families):
    assert names_in(dashboard_expressions()) - sample_names(families) == set()


async def test_labels_are_those_that_the_metrics_have(families):
    """`by (x)`, `{x=...}` and `{{x}}` are labels of ours, or Prometheus's own."""
    known = {"le", "job", "instance"}
    for family in families:
        known |= {label for sample in family.samples for label in sample.labels}
        known |= set(getattr(family, "_labelnames", ()))
    known |= {"path", "status", "link", "reason"}  # of counters that have counted nothing yet
    text = " ".join([*alert_expressions(), *dashboard_expressions()])
    named = {label for group in re.findall(r"by \(([^)]*)\)", text) for label in group.split(", ")}
    named |= set(re.findall(r"[{,]\s*(\w+)\s*[=!]~?=?\"", text))
    legends = [target["legendFormat"] for panel in panels() for target in panel["targets"]]
    named |= {label for legend in legends for label in re.findall(r"\{\{(\w+)\}\}", legend)}
    assert named - known == set()


def test_an_alert_says_what_happened_and_what_it_means():
    for group in ALERTS["groups"]:
        for rule in group["rules"]:
            assert set(rule["annotations"]) == {"summary", "description"}, rule["alert"]
            assert rule["labels"]["severity"] in ("warning", "critical")


def test_panels_ask_the_provisioned_source_and_do_not_overlap():
    (source,) = DATASOURCES["datasources"]
    taken = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells
    for panel in panels():
        assert panel["description"]
        assert {target["datasource"]["uid"] for target in panel["targets"]} == {source["uid"]}


def test_prometheus_looks_at_every_service_at_the_port_its_image_has():
    jobs = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())["scrape_configs"]
    found = {job["job_name"]: job["dns_sd_configs"] for job in jobs if "dns_sd_configs" in job}
    assert set(found) == {"gateway", "scheduler", "executor"}
    for service, (lookup,) in found.items():
        image = (ROOT / f"ops/docker/{service}.Dockerfile").read_text()
        assert lookup["names"] == [service]
        assert f"SPLITFLAP_METRICS_PORT={lookup['port']}" in image


def test_prometheus_itself_takes_the_configuration_where_it_is_installed():
    promtool = shutil.which("promtool")
    if promtool is None:
        assert "alerts.yml" in (PROMETHEUS / "prometheus.yml").read_text()
        return
    done = subprocess.run(
        [promtool, "check", "config", PROMETHEUS / "prometheus.yml"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr

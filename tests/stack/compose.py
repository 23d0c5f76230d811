"""`docker compose` or `podman-compose`, whichever is here, with a project of this test run's own.

COMPOSE_COMMAND names another command, or one with flags; for podman-compose behind a registry of
one's own: COMPOSE_COMMAND='podman-compose --podman-build-args="--network host"'.
"""

import contextlib
import json
import os
import shlex
import subprocess
import urllib.parse
from dataclasses import dataclass
from pathlib import Path

from tests.stack.stack import ROOT, fetch, free_port, until

BUILT_WITHIN_S = 1800
READY_WITHIN_S = 300
SEEN_WITHIN_S = 60  # some times what DNS and Prometheus need
_METRICS = "import urllib.request as it; print(it.urlopen('http://127.0.0.1:9100/metrics').read().decode())"
KNOWN = ((["docker", "compose"], ["docker", "info"]), (["podman-compose"], ["podman", "info"]))


def works(command):
    try:
        return subprocess.run(command, capture_output=True, check=False, timeout=60).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def compose_command():
    """How compose is called here; None if there is no engine to run it."""
    if told := os.environ.get("COMPOSE_COMMAND"):
        return shlex.split(told)
    for command, engine in KNOWN:
        if works(engine) and works([*command, "version"]):
            return command
    return None


@dataclass
class Project:
    """docker-compose.yml, up under a name and at ports of its own."""

    command: list[str]
    name: str
    port: int
    prometheus_port: int
    settings: Path

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def compose(self, *arguments, within_s=READY_WITHIN_S):
        environment = {
            **os.environ,
            "PROXY_ADDRESS": f"127.0.0.1:{self.port}",
            "PROMETHEUS_PORT": str(self.prometheus_port),
            "SETTINGS_FILE": str(self.settings),
        }
        done = subprocess.run(
            [*self.command, "-p", self.name, *arguments],
            cwd=ROOT, env=environment, timeout=within_s,
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{arguments}: {done.stdout[-3000:]}{done.stderr[-3000:]}"

    def engine(self, *arguments):
        name = "podman" if "podman" in self.command[0] else "docker"
        done = subprocess.run([name, *arguments], capture_output=True, text=True, check=True)
        return done.stdout.split()

    def containers(self, *, service):
        """Ids of those that run."""
        return self.engine("ps", "--quiet", *_labelled(project=self.name, service=service))

    def metric_of(self, container, name):
        """What it says itself, at this moment."""
        words = self.engine("exec", container, "python", "-c", _METRICS)
        *_, last = (at for at, word in enumerate(words) if word == f"splitflap:{name}")
        return float(words[last + 1])  # two comments name it before

    def metric(self, service, name):
        """The sum over a service's containers."""
        return sum(self.metric_of(one, name) for one in self.containers(service=service))

    def remove(self):
        """Everything that is its own, down to the volumes."""
        for service in ("proxy", "gateway"):  # podman-compose knows of the first two gateways only
            gone = self.engine(
                "ps", "--all", "--quiet", *_labelled(project=self.name, service=service)
            )
            if gone:
                self.engine("rm", "--force", *gone)
        self.compose("down", "--volumes")
        for kind in ("ps --all", "volume ls"):
            left = self.engine(*kind.split(), "--quiet", *_labelled(project=self.name))
            assert not left, f"{kind}: {left}"

    def scale(self, num_gateways):
        """Until so many gateways run and are watched."""
        self.compose("up", "-d", "--no-build", "--scale", f"gateway={num_gateways}", *WANTED)
        until(
            lambda: self.num_up("gateway") == num_gateways,
            f"{num_gateways} gateways that Prometheus sees",
            SEEN_WITHIN_S,
        )

    def asked(self, expression):
        """What Prometheus says: [(labels, value)]."""
        query = urllib.parse.urlencode({"query": expression})
        _, page = fetch(f"http://127.0.0.1:{self.prometheus_port}/api/v1/query?{query}")
        return [
            (sample["metric"], float(sample["value"][1]))
            for sample in json.loads(page)["data"]["result"]
        ]

    def num_up(self, job):
        return sum(value for _, value in self.asked(f'up{{job="{job}"}}'))

    def is_ready(self):
        return fetch(self.url + "/health/ready")[0] == 200


WANTED = ("proxy", "prometheus")  # and what they depend on; Grafana only shows what these have


@contextlib.contextmanager
def project(command, folder, settings):
    """All of docker-compose.yml but Grafana, built and ready; gone afterwards."""
    file = folder / "settings.env"
    file.write_text(settings)
    up = Project(command, f"splitflap-test-{os.getpid()}", free_port(), free_port(), file)
    up.compose("build", "gateway", "scheduler", "executor", within_s=BUILT_WITHIN_S)
    try:
        up.compose("up", "-d", "--no-build", *WANTED)
        until(up.is_ready, "ready through the proxy", READY_WITHIN_S)
        yield up
    finally:
        up.remove()


def _labelled(**labels):
    return [f"--filter=label=com.docker.compose.{name}={value}" for name, value in labels.items()]

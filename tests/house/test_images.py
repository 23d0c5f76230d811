"""What an image installs is all that its service imports, and not more than that."""

import ast
import re
import subprocess
import sys
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ALONE = """
import sys
absent = set({absent!r})
class NotInTheImage:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in absent:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, NotInTheImage())
import services.cli, shared.settings, {module}
"""
ROOMS = {
    "scheduler": ("services.scheduler.process", ["services/scheduler"]),
    "gateway": ("services.gateway.app", ["services/gateway", "shared"]),
    "executor": ("services.executor.server", ["services/executor", "kernels", "shared"]),
}


def listed(service):
    """The requirements of an image: names of distributions."""
    found = set()
    for line in (ROOT / f"ops/docker/{service}.txt").read_text().splitlines():
        if line.startswith("-r "):
            found |= listed(line.removeprefix("-r ").removesuffix(".txt"))
        elif line and not line.startswith("#"):
            found.add(line)
    return found


def normal(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def with_all_they_need(names):
    """`names` and what they require, extras and other platforms aside."""
    closed, open_ = set(), {normal(name) for name in names}
    while open_:
        name = open_.pop()
        closed.add(name)
        for requirement in requires(name) or ():
            wanted, _, marker = requirement.partition(";")
            if "extra ==" not in marker and "platform_system" not in marker:
                needed = normal(re.match(r"[\w.-]+", wanted)[0])
                if needed not in closed and needed in INSTALLED:
                    open_.add(needed)
    return closed


OURS = {"shared", "services", "kernels"}
DISTRIBUTIONS = packages_distributions()
INSTALLED = {normal(name) for names in DISTRIBUTIONS.values() for name in names}


def distributions_of(modules):
    """Distributions that own top-level `modules`; Python's own and ours have none."""
    return {
        normal(name)
        for module in modules - OURS - sys.stdlib_module_names
        for name in DISTRIBUTIONS.get(module, ())
    }


def imports_in(folders):
    """Top-level modules that the files of `folders` import anywhere, functions included."""
    found = set()
    for path in [path for folder in folders for path in (ROOT / folder).rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.add(node.module.split(".")[0])
    return found


@pytest.mark.parametrize("service", ROOMS)
def test_a_service_starts_with_what_its_image_has(service):
    there = with_all_they_need(listed(service))
    absent = [
        module
        for module, names in DISTRIBUTIONS.items()
        if module not in OURS and not there & {normal(name) for name in names}
    ]
    program = ALONE.format(absent=absent, module=ROOMS[service][0])
    report = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert report.returncode == 0, report.stderr


@pytest.mark.parametrize("service", ROOMS)
def test_an_image_has_all_that_its_service_names(service):
    needed = distributions_of(imports_in(ROOMS[service][1])) - {"triton"}  # CUDA's torch brings it
    assert needed - with_all_they_need(listed(service)) == set()


@pytest.mark.parametrize("service", ROOMS)
def test_an_image_has_nothing_that_its_service_does_not_import(service):
    used = distributions_of(imports_in([*ROOMS[service][1], "shared"]))
    assert listed(service) - used - {"uvloop"} == set()  # which services/cli.py runs


@pytest.mark.parametrize("service", ROOMS)
def test_no_service_is_process_1_of_its_container(service):
    """That one cannot be killed from inside, by the guard that ends what stands still."""
    file = (ROOT / f"ops/docker/{service}.Dockerfile").read_text()
    assert file.rstrip().endswith(f'ENTRYPOINT ["tini", "--", "splitflap", "{service}"]')
    assert re.search(r"apt-get install [^\n]* tini\b", file)

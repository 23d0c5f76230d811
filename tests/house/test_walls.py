"""The walls of the house: who may import whom, and what must not be there at all."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = [
    path for room in ("shared", "services", "kernels") for path in (ROOT / room).rglob("*.py")
]


def importers_of(module):
    pattern = re.compile(rf"^\s*(import|from) {module}\b", re.MULTILINE)
    return {str(path.relative_to(ROOT)) for path in SOURCES if pattern.search(path.read_text())}


def run(*command):
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_import_linter_keeps_every_contract():
    report = run(str(Path(sys.executable).with_name("lint-imports")))
    assert report.returncode == 0, report.stdout


def test_one_place_knows_msgpack_and_two_know_zmq():
    assert importers_of("msgpack") == {"shared/codec.py"}
    assert importers_of("zmq") == {"shared/links.py", "shared/curve.py"}


@pytest.mark.parametrize(
    "module", ["pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "code", "runpy"]
)
def test_nobody_unpickles(module):
    assert importers_of(module) == set()


RUNS_CODE = {"eval", "exec", "compile", "__import__"}
UNPICKLES = {"torch.load", "numpy.load", "np.load", "pandas.read_pickle"}


def called(path):
    """What a module calls by name: `eval`, `torch.load`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func)
            yield from (f"{word.arg}=" for word in node.keywords if word.arg is not None)


def test_nobody_runs_text_as_code_or_loads_what_may_be_code():
    found = {(str(path.relative_to(ROOT)), name) for path in SOURCES for name in called(path)}
    assert ("services/cli.py", "sys.stderr.write") in found
    forbidden = RUNS_CODE | UNPICKLES | {"trust_remote_code=", "allow_pickle="}
    assert {(path, name) for path, name in found if name in forbidden} == set()


def test_kernels_stays_an_empty_package():
    assert (ROOT / "kernels" / "__init__.py").read_text() == ""


def test_transformers_works_beside_a_package_called_kernels():
    """It probes for a top-level package of this name, a library of Hugging Face's."""
    report = run(sys.executable, "-c", "import kernels; from transformers import PreTrainedModel")
    assert report.returncode == 0, report.stderr


BLOCKED = """
import sys
class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "numba", "triton"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, NoTorch())
import services.cli, %s
assert "torch" not in sys.modules
"""


@pytest.mark.parametrize("module", ["services.gateway.app", "services.scheduler.process"])
def test_gateway_and_scheduler_run_where_there_is_no_torch(module):
    report = run(sys.executable, "-c", BLOCKED % module)
    assert report.returncode == 0, report.stderr


def test_every_setting_is_in_the_readme():
    from shared.settings import UpSettings

    readme = (ROOT / "README.md").read_text()
    flags = {"--" + name.replace("_", "-") for name in UpSettings.model_fields}
    assert {flag for flag in flags if f"`{flag}" not in readme} == set()


def test_the_map_names_every_room():
    """docs/map.md is true: each package and module of ours is on it."""
    drawn = (ROOT / "docs" / "map.md").read_text()
    modules = {path.name for path in SOURCES if path.name != "__init__.py"}
    assert {name for name in modules if name not in drawn} == set()


@pytest.mark.parametrize("page", ["operations.md", "security.md"])
def test_what_operators_are_told_of_is_there(page):
    """Log lines, metrics and flags by their names."""
    from shared.settings import UpSettings

    told = (ROOT / "docs" / page).read_text()
    there = "".join(path.read_text() for path in SOURCES)
    there += (ROOT / "docker-compose.yml").read_text() + " limit_req limit_conn "
    names = re.findall(r"`(?:splitflap:)?([a-z]+(?:_[a-z]+)+)(?:=|\{.*?\})?`", told)
    assert len(names) > 5
    assert {name for name in names if name.removesuffix("_total") not in there} == set()
    known = {"--" + name.replace("_", "-") for name in UpSettings.model_fields}
    others = {"--name", "--out", "--workload", "--max-concurrency", "--ignore-eos"}
    others |= {"--trust-remote-code"}  # which there is not
    assert set(re.findall(r"(?<![-\w])--[a-z][a-z-]+", told)) - known - others == set()

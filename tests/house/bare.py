"""Python as it is on a machine with torch, triton and numpy, and nothing else of ours."""

from pathlib import Path

SITE = """
import sys

TORCHS_OWN = {
    "functorch", "torchgen", "sympy", "mpmath", "networkx", "jinja2", "markupsafe", "fsspec",
    "filelock", "typing_extensions", "setuptools", "pkg_resources", "_distutils_hack",
}
OURS = {"kernels", "ops", "shared", "services"}
KNOWN = set(sys.stdlib_module_names) | TORCHS_OWN | OURS | {"torch", "triton", "numpy"}
OUR_SERVICES = {"services", "services.executor", "services.scheduler", "services.scheduler.core"}


class Bare:
    def find_spec(self, name, path=None, target=None):
        is_ours = name.startswith("services.") and name not in OUR_SERVICES and not name.startswith(
            ("services.executor.", "services.scheduler.core.")
        )
        top = name.split(".")[0]
        if is_ours or (top not in KNOWN and not top.startswith("_")):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Bare())
"""


def bare_site(folder: Path) -> Path:
    """A folder that makes Python so when it is in PYTHONPATH, for child processes too."""
    (folder / "sitecustomize.py").write_text(SITE)
    return folder

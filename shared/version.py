"""The version of this program."""

from importlib.metadata import PackageNotFoundError, version


def _installed() -> str:
    try:
        return version("splitflap")
    except PackageNotFoundError:  # run from a checkout that was never installed
        return "0+unknown"


VERSION = _installed()

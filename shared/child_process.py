"""How a process of ours starts another one: with our modules, in whatever folder it is.

`python -m` looks into the current folder before all else, the standard library included. What lies
there is the user's, or a model's, and no business of ours.
"""

import os
import site
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

_MODULES: Final = str(Path(__file__).parents[1])


def command(module: str, *arguments: str) -> list[str]:
    """What runs one of our modules, but imports nothing from the current folder (-P).

    >>> command("services.cli", "executor")[1:]
    ['-P', '-m', 'services.cli', 'executor']
    """
    return [sys.executable, "-P", "-m", module, *arguments]


def environment(given: Mapping[str, str]) -> dict[str, str]:
    """`given`, with a PYTHONPATH that leads to our modules where they are not installed.

    >>> first, *others = environment({"PYTHONPATH": "/theirs"})["PYTHONPATH"].split(os.pathsep)
    >>> (Path(first) / "shared").is_dir(), others
    (True, ['/theirs'])
    """
    places = [place for place in given.get("PYTHONPATH", "").split(os.pathsep) if place]
    if _MODULES in [*places, *site.getsitepackages(), site.getusersitepackages()]:
        return dict(given)
    return {**given, "PYTHONPATH": os.pathsep.join([_MODULES, *places])}

"""How often the garbage collector looks for cycles, in processes that make thousands of objects a
step and drop them again at its end."""

import gc
from typing import Final

NEW_OBJECTS: Final = 20_000
"""So many more than were dropped, and it looks. Python's 700 are a message of 150 tokens: reading
one of 2,000 took five times as long for it."""


def collect_seldom() -> None:
    """Call it when all is there that is here to stay: that is not looked through again."""
    gc.freeze()
    gc.set_threshold(NEW_OBJECTS)

"""How processes know that a peer lives, and that it is still the same one."""

import secrets
from typing import Final

from shared.ids import Boot

HEARTBEAT_S: Final = 0.5
"""Seconds between two heartbeats of the executor, and of the scheduler to it."""

SILENCE_S: Final = 3.0
"""A peer not heard for so many seconds is gone."""


def new_boot() -> Boot:
    """A fresh boot number for this process life."""
    return Boot(secrets.randbits(64))

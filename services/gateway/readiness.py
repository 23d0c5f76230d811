"""What a gateway knows of its scheduler: whether it answers, and whether it can serve."""

import asyncio
import time
from dataclasses import dataclass

from shared.ids import Boot
from shared.liveness import SILENCE_S
from shared.logs import get_logger
from shared.messages import Activity, Heartbeat, Welcome

_log = get_logger("link")


@dataclass(frozen=True, slots=True)
class LinkTimes:
    """Seconds: between beats, of silence until not ready, not ready until open requests end."""

    beat_s: float = 1.0
    silent_s: float = SILENCE_S
    lost_s: float = 60.0


class Readiness:
    """Ready = a scheduler with our model said Welcome, was heard lately, and names no phase.

    It names one while it has no executor: requests then still queue, for `lost_s`.
    """

    def __init__(self, model: str, vocab_size: int, times: LinkTimes) -> None:
        self._model = model
        self._vocab_size = vocab_size
        self._times = times
        self._phase = ""
        self._mismatch = ""
        self._heard_at = self._ready_at = time.monotonic()
        self._next_beat = asyncio.Event()
        self.activity = Activity.IDLE
        """What the scheduler was doing at its last heartbeat."""
        self.boot: Boot | None = None
        self.welcome: Welcome | None = None
        """What the scheduler said of the model it serves, if that is ours."""

    @property
    def is_ready(self) -> bool:
        """Nothing is missing."""
        return self._can_queue and not self._phase

    @property
    def takes_requests(self) -> bool:
        """Ready, or it may become so in time for a request that comes now."""
        return self.is_ready or (self._can_queue and not self.is_lost)

    @property
    def is_lost(self) -> bool:
        """Not ready for so long that nobody should wait any longer."""
        return time.monotonic() - self._ready_at > self._times.lost_s

    @property
    def phase(self) -> str:
        """What is missing until ready; "" when nothing is."""
        if self.is_ready:
            return ""
        if self.boot is None or self._is_silent:
            return "waiting for the scheduler"
        return self._mismatch or self._phase or "waiting for the scheduler's welcome"

    @property
    def is_heard(self) -> bool:
        """Whether a scheduler answers; it may lack an executor."""
        return self.boot is not None and not self._is_silent

    @property
    def is_mismatched(self) -> bool:
        """Whether it serves another model than ours, which no waiting mends."""
        return bool(self._mismatch)

    @property
    def _can_queue(self) -> bool:
        return self.welcome is not None and not self._is_silent

    @property
    def _is_silent(self) -> bool:
        return time.monotonic() - self._heard_at > self._times.silent_s

    def heard(self) -> None:
        """The scheduler said something."""
        self._heard_at = time.monotonic()

    async def next_beat(self, timeout_s: float) -> None:
        """Until the scheduler says which life it is in: by then all before is known to be of it.

        Raises: TimeoutError.
        """
        async with asyncio.timeout(timeout_s):
            await self._next_beat.wait()

    def beat(self, heartbeat: Heartbeat) -> bool:
        """The scheduler's heartbeat. True if it is another life than before."""
        self._next_beat.set()
        self._next_beat = asyncio.Event()
        self._phase = heartbeat.phase
        self.activity = heartbeat.activity
        is_new = heartbeat.boot != self.boot
        if is_new:
            self.boot = heartbeat.boot
            self.welcome = None
        self._note_if_ready()
        return is_new

    def welcomed(self, welcome: Welcome) -> bool:
        """The scheduler's welcome. False if its model is not ours."""
        self.boot = welcome.boot
        mismatch = self._compare(welcome)
        if mismatch and mismatch != self._mismatch:
            _log.error("model_mismatch", why=mismatch)
        self._mismatch = mismatch
        if mismatch:
            self.welcome = None
            return False
        if self.welcome is None:
            _log.info("welcome", model=welcome.model, max_model_len_tokens=welcome.max_model_len)
        self.welcome = welcome
        self._note_if_ready()
        return True

    def _note_if_ready(self) -> None:
        if self.is_ready:
            self._ready_at = time.monotonic()

    def _compare(self, welcome: Welcome) -> str:
        if welcome.model != self._model:
            return (
                f"the gateway was started with --model {self._model}, the executor with "
                f"{welcome.model}: start both with the same"
            )
        if welcome.shape.vocab_size < self._vocab_size:
            return (
                f"the gateway's tokenizer has {self._vocab_size} tokens, the executor's model "
                f"only {welcome.shape.vocab_size}: start both with the same --model"
            )
        return ""

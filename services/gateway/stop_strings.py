"""Stop strings: found across tokens, and never let out in part."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

MAX_STOP_STRINGS: Final = 16  # OpenAI takes 4, vLLM any number
MAX_STOP_CHARACTERS: Final = 1024


class StopStrings:
    """One automaton for all stop strings of a request (Aho and Corasick 1975).

    Its state is the longest tail of the text that begins a stop string: exactly what must be held
    back. State 0 holds back nothing.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._held = [0]
        self._found: list[str | None] = [None]
        for string in strings:
            self._add(string)
        self._fail = [0] * len(self._next)
        self._link()

    def _add(self, string: str) -> None:
        state = 0
        for depth, character in enumerate(string, start=1):
            if character not in self._next[state]:
                self._next[state][character] = len(self._next)
                self._next.append({})
                self._held.append(depth)
                self._found.append(None)
            state = self._next[state][character]
        self._found[state] = string

    def _link(self) -> None:
        """Breadth first: where a state goes on when its own string does not."""
        waiting = deque(self._next[0].values())
        while waiting:
            state = waiting.popleft()
            for character, child in self._next[state].items():
                self._fail[child] = self.step(self._fail[state], character)
                if self._found[child] is None:
                    self._found[child] = self._found[self._fail[child]]
                waiting.append(child)

    def step(self, state: int, character: str) -> int:
        """The state after one more character."""
        while state and character not in self._next[state]:
            state = self._fail[state]
        return self._next[state].get(character, 0)

    def held(self, state: int) -> int:
        """How many characters must be held back in this state."""
        return self._held[state]

    def found(self, state: int) -> str | None:
        """The stop string that ends here; of several, the one that begins first."""
        return self._found[state]


@dataclass(slots=True)
class StopScanner:
    """Reads one sequence's text; lets out what surely is before any stop string.

    The stop string that is complete first wins; `matched` names it, and nothing comes after it.
    With `includes_match` it is let out itself, so nothing need be held back.
    """

    strings: StopStrings
    includes_match: bool = False
    matched: str | None = None
    _state: int = 0
    _held: str = ""

    def feed(self, text: str) -> str:
        """The text that may go out now."""
        if self.matched is not None:
            return ""
        pending = self._held + text
        for index in range(len(self._held), len(pending)):
            self._state = self.strings.step(self._state, pending[index])
            self.matched = self.strings.found(self._state)
            if self.matched is not None:
                self._held = ""
                cut = 0 if self.includes_match else len(self.matched)
                return pending[: index + 1 - cut]
        if self.includes_match:
            return pending
        cut = len(pending) - self.strings.held(self._state)
        self._held = pending[cut:]
        return pending[:cut]

    def flush(self) -> str:
        """The text ended: what was held back was no stop string."""
        held, self._held, self._state = self._held, "", 0
        return held

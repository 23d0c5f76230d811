"""Clients that want their whole stream, whatever happens on the way, and wishes of every kind."""

import contextlib
import http.client
from concurrent.futures import ThreadPoolExecutor

from tests.stack.client import complete
from tests.stack.gateways import ask, joined
from tests.stack.stack import until

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TALK = [{"role": "user", "content": "tell me"}]
LONG = {"prompt": "a long story", "max_tokens": 120, "ignore_eos": True, "seed": 3}
WISHES = {
    "greedy": (COMPLETIONS, {**LONG, "temperature": 0, "return_token_ids": True}),
    "several answers": (
        COMPLETIONS,
        {
            **LONG, "n": 3, "presence_penalty": 0.4, "repetition_penalty": 1.2,
            "bad_words": ["ab"], "return_token_ids": True,
        },
    ),
    "log-probabilities": (COMPLETIONS, {**LONG, "logprobs": 2, "echo": True}),
    "several prompts": (COMPLETIONS, {**LONG, "prompt": ["one", "two"]}),
    "a chat": (CHAT, {**LONG, "prompt": None, "messages": TALK, "return_token_ids": True}),
    "beams": (
        CHAT,
        {"messages": TALK, "max_tokens": 60, "ignore_eos": True, "use_beam_search": True, "n": 2},
    ),
}  # fmt: skip


def wishes(stack):
    """`WISHES`, and one whose answer ends at a stop string in its second half."""
    text = complete(stack, **LONG)["choices"][0]["text"]
    return {**WISHES, "a stop string": (COMPLETIONS, {**LONG, "stop": [text[70:74]]})}


class Traveller:
    """One client's stream, over as many connections as it takes.

    It goes to one gateway after the other, and each time says the request and how far it has come.
    """

    def __init__(self, doors, path, wish):
        self._doors = doors
        self._path = path
        self._body = {**wish, "stream": True, "stream_options": {"include_usage": True}}
        self.readers = []

    def travel(self):
        """All of it; returns the choices as they were told."""
        last_id, is_whole = "", False
        while not is_whole:
            reader = until(lambda: self._connected(last_id), "somebody answers", 90)  # noqa: B023
            self.readers.append(reader)
            reader.read()
            if reader.error == "gateway_draining":
                reader.chunks.pop()
            else:
                assert reader.error is None, reader.chunks[-1]
                is_whole = reader.is_done
            last_id = reader.last_id or last_id
        return joined(*self.readers)

    @property
    def num_chunks(self):
        return sum(len(reader.chunks) for reader in self.readers)

    @property
    def usages(self):
        return [
            chunk["usage"]
            for reader in self.readers
            for chunk in reader.chunks
            if chunk.get("usage")
        ]

    def _connected(self, last_id):
        door = self._doors[len(self.readers) % len(self._doors)]
        headers = {"Last-Event-ID": last_id} if last_id else {}
        for one in (door, *self._doors):
            with contextlib.suppress(OSError, http.client.HTTPException):
                if found := ask(one, "POST", self._path, self._body, headers, may_be_away=True):
                    return found
        return None


class Load:
    """Travellers at once, one for each wish."""

    def __init__(self, doors, asked):
        self.names = [*asked]
        self.travellers = [
            Traveller([*doors[at % len(doors) :], *doors[: at % len(doors)]], *asked[name])
            for at, name in enumerate(self.names)
        ]
        self._pool = ThreadPoolExecutor(len(self.names))
        self._told = [self._pool.submit(traveller.travel) for traveller in self.travellers]

    def are_all_under_way(self, chunks=3):
        """Each has been told something, but for beams, which are told at their end."""
        return all(
            name == "beams" or (one.readers and one.num_chunks >= chunks)
            for name, one in zip(self.names, self.travellers, strict=True)
        )

    def results(self):
        """What each is told at last, {name: choices}; its usage was told it once."""
        with self._pool:
            told = [one.result(200) for one in self._told]
        for name, one in zip(self.names, self.travellers, strict=True):
            assert len(one.usages) == 1, name
        return dict(zip(self.names, told, strict=True))


def calm_answers(door, asked):
    """What each is told when nothing happens."""
    return Load([door], asked).results()

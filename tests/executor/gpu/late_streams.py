"""A device whose streams run late, beside each other, in any order that their waits allow."""

import random
from collections import deque

import torch


class LateEvent:
    """A point in a stream, that the stream may not have come to."""

    def __init__(self, device):
        self.device = device
        self.is_past = False

    def is_done(self):
        return self.is_past

    def wait(self):
        while not self.is_past and not self.device.is_hasty:
            self.device.advance()

    def seconds_since(self, earlier):
        return 0.0


class LateStream:
    """Jobs, points and waits, not yet carried out."""

    def __init__(self, device, name):
        self.device, self.name = device, name
        self.queue = deque()

    def run(self, job):
        self.queue.append(("run", job))

    def record(self):
        event = LateEvent(self.device)
        self.queue.append(("record", event))
        return event

    def wait(self, event):
        if self.name not in self.device.deaf:
            self.queue.append(("wait", event))

    def can_go_on(self):
        return bool(self.queue) and (self.queue[0][0] != "wait" or self.queue[0][1].is_past)

    def go_on(self):
        kind, what = self.queue.popleft()
        if kind == "run":
            with torch.inference_mode():
                what()
            self.device.ran.append(self.name)
        elif kind == "record":
            what.is_past = True


class LateStreams:
    """`Streams`, driven by whoever waits.

    Args:
        seed: of the order of things; with one in three the transfer stream is slow, with another
            the one that computes.
        deaf: streams that forget to wait: what a missing wait would do.
        is_hasty: the host forgets to wait.
    """

    def __init__(self, seed, deaf=(), is_hasty=False):
        self.device = torch.device("cpu")
        self.deaf, self.is_hasty = deaf, is_hasty
        self.random = random.Random(seed)
        self.weights = ((9, 1), (1, 1), (1, 9))[seed % 3]
        self.compute, self.transfer = LateStream(self, "compute"), LateStream(self, "transfer")
        self.streams = (self.compute, self.transfer)
        self.ran = []

    def advance(self):
        weights = [
            weight * stream.can_go_on()
            for stream, weight in zip(self.streams, self.weights, strict=True)
        ]
        assert any(weights), "every stream waits for another"
        self.random.choices(self.streams, weights)[0].go_on()

    def host(self, shape, dtype):
        return torch.full(shape, 0, dtype=dtype)

    def graph_memory(self):
        return None

    def capture(self, job, memory):
        self.compute.run(job)
        self.synchronize()
        return job

    def synchronize(self):
        while any(stream.queue for stream in self.streams):
            self.advance()

"""Sampling by the book: sort everything, in float64. The reference for the fast sampler."""

import math

import numpy as np

from tests.executor.plain_philox import uniform


def kept(logits, draw):
    """{id: probability} of what top-k, top-p and min-p leave, in the order of the logits."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    peak = float(logits[order[0]])
    weights = {i: math.exp((float(logits[i]) - peak) / draw.temperature) for i in order}
    if 0 < draw.top_k < len(order):
        order = order[: draw.top_k]
    total = sum(weights[i] for i in order)
    if draw.top_p < 1:
        mass, enough = 0.0, 0
        for i in order:
            mass += weights[i]
            enough += 1
            if mass >= draw.top_p * total:
                break
        order = order[:enough]
    order = [i for i in order if weights[i] >= draw.min_p]
    total = sum(weights[i] for i in order)
    return {i: weights[i] / total for i in order if weights[i] > 1e-44}


def is_right(token, logits, sample, position):
    """Whether `token` is what the die of this draw falls on, but for the last bits of a float."""
    logits = np.array(logits, np.float32)
    logits[list(sample.banned_ids)] = -np.inf
    if sample.draw.temperature == 0:
        return token == int(logits.argmax())
    die = uniform(sample.seed, sample.index, position)
    mass = 0.0
    for i, probability in sorted(kept(logits, sample.draw).items()):
        if i == token:
            return mass - 1e-5 <= die <= mass + probability + 1e-5
        mass += probability
    return False

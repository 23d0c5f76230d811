"""Sampling by the book: sort everything, in float64. The reference for the fast sampler."""

import math
from collections import Counter

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


def adjusted(logits, sample):
    """[vocab_size] float64: bias, penalties, exclusions, one token at a time."""
    draw, said = sample.draw, Counter(sample.history[sample.num_prompt :])
    bias = dict(draw.logit_bias)
    ends = {
        word[-1]
        for word in draw.bad_words
        if len(word) == 1 or sample.history[-len(word) + 1 :] == word[:-1]
    }
    result = np.array(logits, np.float64)
    for token in range(len(result)):
        value = result[token] + bias.get(token, 0.0)
        if token in sample.history:
            value *= draw.repetition_penalty if value < 0 else 1 / draw.repetition_penalty
        value -= said[token] * draw.frequency_penalty + bool(said[token]) * draw.presence_penalty
        is_allowed = not draw.allowed_token_ids or token in draw.allowed_token_ids
        is_excluded = not is_allowed or token in ends or token in sample.banned_ids
        result[token] = -math.inf if is_excluded else value
    return result


def is_right(token, logits, sample, position):
    """Whether `token` is what the die of this draw falls on, but for the last bits of a float."""
    logits = adjusted(logits, sample)
    if sample.draw.temperature == 0:
        return bool(logits[token] >= logits.max() - 1e-5)
    die = uniform(sample.seed, sample.index, position)
    mass = 0.0
    for i, probability in sorted(kept(logits, sample.draw).items()):
        if i == token:
            return mass - 1e-5 <= die <= mass + probability + 1e-5
        mass += probability
    return False

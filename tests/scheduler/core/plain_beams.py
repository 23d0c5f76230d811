"""Beam search written once more, with nothing but lists over the whole vocabulary.

It follows transformers' `_beam_search` (5.24) step by step: every candidate of every beam, the best
(1 + stop tokens) x width of them, which of these stop, which run on, which are kept as finished.
`opinion(tokens)` is the model: the log-probability of every token of the vocabulary after these.
"""

from dataclasses import dataclass

from shared.sampling import EarlyStopping

NEVER_BORN = -1.0e9


@dataclass
class Text:
    """Tokens after the prompt; the sum of their log-probabilities, or what that is worth."""

    tokens: tuple
    score: float
    is_stopped: bool = False


def plain_beams(opinion, prompt, params, max_tokens, stops):
    """The `params.n` best texts, best first."""
    width, penalty = params.n, params.length_penalty
    running, finished = [Text((), 0.0)], []
    for length in range(1, max_tokens + 1):
        candidates = []
        for number, beam in enumerate(running):
            for token_id, logprob in enumerate(opinion((*prompt, *beam.tokens))):
                if token_id in stops and length <= params.min_tokens:
                    continue
                text = Text((*beam.tokens, token_id), beam.score + logprob, token_id in stops)
                candidates.append((-text.score, number, token_id, text))
        candidates = [text for *_, text in sorted(candidates, key=lambda one: one[:3])]
        candidates = candidates[: max(2, 1 + len(stops)) * width]
        is_over = [text.is_stopped or length == max_tokens for text in candidates]
        finished += [
            Text(text.tokens, text.score / length**penalty, text.is_stopped)
            for text, over in list(zip(candidates, is_over, strict=True))[:width]
            if over
        ]
        finished = sorted(finished, key=lambda text: -text.score)[:width]
        running = [t for t, over in zip(candidates, is_over, strict=True) if not over][:width]
        if not running:
            break
        is_full = len(finished) == width
        worst = finished[-1].score if is_full else NEVER_BORN
        until = length
        if params.early_stopping is EarlyStopping.NEVER and penalty > 0:
            until = max_tokens
        if running[0].score / until**penalty <= worst:
            break
        if is_full and params.early_stopping is EarlyStopping.YES:
            break
    return finished

"""The search alone, against the same search written once more over the whole vocabulary."""

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.core.beam_search import BeamSearch
from services.scheduler.core.decoding import Beam
from services.scheduler.core.sequence import Sequence
from services.scheduler.core.stems import find_stems
from shared.ids import SequenceId
from shared.messages import PositionLogprobs
from shared.sampling import NO_DRAW, EarlyStopping, SamplingParams
from tests.fuzzing import many_cases
from tests.scheduler.core.plain_beams import plain_beams

PROMPT = (1, 2, 3)


class Model:
    """A fixed opinion after every text; in `steps` of which sums are exact, so equals are equal."""

    def __init__(self, seed, vocab, steps):
        self.seed, self.vocab, self.steps = seed, vocab, steps

    def opinion(self, tokens):
        dice = Random(repr((self.seed, tokens)))
        return [-dice.randrange(self.steps) / 16 for _ in range(self.vocab)]

    def report(self, tokens, num_top):
        worth = self.opinion(tokens)
        best = sorted(range(self.vocab), key=lambda one: (-worth[one], one))[:num_top]
        return PositionLogprobs(worth[best[0]], 1, tuple(best), tuple(worth[one] for one in best))


def search(model, params, max_tokens, stops):
    """(texts, values, whether they stopped) that the search finds, best first."""
    decoding = Beam(params, stops, model.vocab)
    running = BeamSearch(params, max_tokens, stops)
    beams = (Sequence(SequenceId(1), 0, PROMPT),)
    while beams:
        for beam in beams:
            beam.report = model.report((*PROMPT, *beam.generated), decoding.num_top)
        beams = tuple(
            _grown(beams[branch.parent], branch.token_id, running)
            for branch in running.expand(beams)
        )
        assert len(beams) in (0, params.n)
    return running.hypotheses


def _grown(beam, token_id, running):
    told = (*beam.logprobs, *running.told(beam, token_id))
    return Sequence(SequenceId(1), 0, PROMPT, (*beam.generated, token_id), told)


@many_cases
@given(
    seed=st.integers(0, 2**20),
    vocab=st.integers(8, 20),
    steps=st.sampled_from((3, 40, 1_000)),
    n=st.integers(1, 5),
    stops=st.sets(st.integers(0, 7), max_size=3).map(frozenset),
    max_tokens=st.integers(1, 9),
    min_tokens=st.integers(0, 4),
    length_penalty=st.sampled_from((-1.0, 0.0, 0.5, 1.0, 2.0)),
    early_stopping=st.sampled_from(EarlyStopping),
    logprobs=st.sampled_from((None, 0, 4)),
)
def test_the_same_texts_as_the_plain_search(
    seed, vocab, steps, n, stops, max_tokens, min_tokens, length_penalty, early_stopping, logprobs
):
    params = SamplingParams(
        n=n, draw=NO_DRAW, use_beam_search=True, length_penalty=length_penalty,
        early_stopping=early_stopping, min_tokens=min(min_tokens, max_tokens), logprobs=logprobs,
    )  # fmt: skip
    model = Model(seed, vocab, steps)
    found = search(model, params, max_tokens, stops)
    plain = plain_beams(model.opinion, PROMPT, params, max_tokens, stops)
    assert [(text.token_ids, text.value, text.is_stopped) for text in found] == [
        (text.tokens, text.score, text.is_stopped) for text in plain
    ]
    assert len(found) == n
    for text in found:
        told = [] if logprobs is None else list(enumerate(text.token_ids))
        assert len(text.logprobs) == len(told)
        for (at, token_id), place in zip(told, text.logprobs, strict=True):
            worth = model.opinion((*PROMPT, *text.token_ids[:at]))
            assert place.chosen == worth[token_id]
            assert place.rank == 1 + sum(value > place.chosen for value in worth)
            assert len(place.top_ids) == len(place.top) == logprobs


@many_cases
@given(st.lists(st.lists(st.integers(0, 2), min_size=6, max_size=6), min_size=2, unique_by=tuple))
def test_a_stem_has_most_in_common_of_all_beams_before(texts):
    beams = tuple(Sequence(SequenceId(at), 0, PROMPT, text) for at, text in enumerate(texts))
    find_stems(beams)
    assert beams[0].stem is None
    for at, beam in enumerate(beams[1:], 1):
        most = max(common(before.generated, beam.generated) for before in beams[:at])
        assert beam.num_common == len(PROMPT) + most
        assert beam.stem in beams[:at]
        assert common(beam.stem.generated, beam.generated) == most


def common(one, other):
    return next(at for at, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)

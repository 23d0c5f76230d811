"""Messages of any content that decodes: plausible ones, with some fields gone wild."""

from dataclasses import fields, is_dataclass, replace
from typing import get_args, get_origin, get_type_hints

from hypothesis import strategies as st

from shared.codec import decode, encode
from shared.ids import Biases, Ids
from shared.messages import (
    Attach,
    Cancel,
    CancelReason,
    Detach,
    Done,
    GeneratedSequence,
    Heartbeat,
    ListPins,
    Pin,
    PositionLogprobs,
    RowError,
    Sampled,
    Scored,
    StreamPosition,
    Submit,
    Unpin,
)
from shared.sampling import NO_DRAW, DrawParams, EarlyStopping, FinishReason, SamplingParams
from tests.scheduler.core.toys import VOCAB

INT32 = st.sampled_from((-(2**31), -1, 0, 1, VOCAB - 1, VOCAB, 2**31 - 1)) | st.integers(
    -(2**31), 2**31 - 1
)
PLAIN = {
    int: st.sampled_from((-(2**63), -1, 0, 1, 2, 2**31, 2**63 - 1, 2**64 - 1))
    | st.integers(-9, 99),
    float: st.floats(),
    str: st.text(max_size=5),
    bytes: st.binary(max_size=5),
    bool: st.booleans(),
    type(None): st.none(),
}
NAMES = st.sampled_from(("a", "b", "c", "d")) | PLAIN[str]
GATEWAYS = st.sampled_from((b"g", b"h"))
TOKENS = st.integers(0, VOCAB - 1)


def wild(hint):
    """Any value of one annotation that has a wire form."""
    if hint == Ids:
        return st.lists(INT32, max_size=6).map(tuple)
    if hint == Biases:
        return st.lists(st.tuples(INT32, PLAIN[float]), max_size=6).map(tuple)
    hint = getattr(hint, "__supertype__", hint)
    if is_dataclass(hint):
        hints = get_type_hints(hint, include_extras=True)
        return st.builds(hint, **{name: wild(part) for name, part in hints.items()})
    if get_origin(hint) is tuple:
        parts = get_args(hint)
        if parts[-1] is Ellipsis:
            return st.lists(wild(parts[0]), max_size=3).map(tuple)
        return st.tuples(*map(wild, parts))
    if get_args(hint):
        return st.one_of(*map(wild, get_args(hint)))
    return PLAIN[hint] if hint in PLAIN else st.sampled_from(hint)


@st.composite
def gone_wild(draw, plausible, most=2):
    """A plausible message of which up to `most` fields hold anything."""
    message = draw(plausible)
    hints = get_type_hints(type(message), include_extras=True)
    names = draw(st.lists(st.sampled_from([f.name for f in fields(message)]), max_size=most))
    return replace(message, **{name: draw(wild(hints[name])) for name in names})


def on_the_wire(message):
    """The message as its receiver gets it."""
    return decode(encode(message), (type(message),))


DRAWS = gone_wild(
    st.builds(
        DrawParams,
        presence_penalty=st.sampled_from((0.0, 0.0, 0.5)),
        bad_words=st.sampled_from(((), (), ((1, 2),), ((3,),))),
    ),
    most=1,
)
SANE_SAMPLINGS = st.builds(
    SamplingParams,
    draw=st.sampled_from(
        (DrawParams(), DrawParams(presence_penalty=0.5), DrawParams(bad_words=((1, 2), (3,))))
    ),
    max_tokens=st.sampled_from((None, 0, 1, 4, 9)),
    min_tokens=st.sampled_from((0, 0, 1)),
    ignore_eos=st.booleans(),
    logprobs=st.sampled_from((None, None, 0, 2)),
    prompt_logprobs=st.sampled_from((None, 0, 2)),
)
SANE_BEAMS = st.builds(
    SamplingParams,
    draw=st.just(NO_DRAW),
    use_beam_search=st.just(True),
    n=st.sampled_from((1, 1, 2, 3)),
    length_penalty=st.sampled_from((-1.0, 0.0, 1.0, 10.0)),
    early_stopping=st.sampled_from(EarlyStopping),
    max_tokens=st.sampled_from((None, 0, 1, 4, 9)),
    min_tokens=st.sampled_from((0, 0, 1)),
    ignore_eos=st.booleans(),
    logprobs=st.sampled_from((None, None, 0, 2)),
    prompt_logprobs=st.sampled_from((None, 0, 2)),
)
SAMPLINGS = gone_wild(SANE_SAMPLINGS, most=1).flatmap(
    lambda params: st.builds(replace, st.just(params), draw=DRAWS)
)
LOGPROBS = st.builds(
    PositionLogprobs,
    st.sampled_from((-1.0, 0.0, float("-inf"))),
    st.integers(1, 9),
    st.sampled_from(((), (1, 2))),
    st.sampled_from(((), (-1.0, -2.0))),
)
SEVERAL_LOGPROBS = st.lists(LOGPROBS, max_size=4).map(tuple)
PROMPTS = st.lists(TOKENS, min_size=1, max_size=12).map(tuple)
KEYS = st.sampled_from((b"", b"", b"k"))
DEADLINES = st.sampled_from((None, None, 0.05, 9.0))
PRIORITIES = st.sampled_from((0, 0, 0, 1, -5))
SANE_SUBMITS = st.builds(
    Submit,
    NAMES,
    PROMPTS,
    SANE_SAMPLINGS | SANE_BEAMS,
    priority=PRIORITIES,
    deadline_s=DEADLINES,
    key_hash=KEYS,
    resubmitted=st.booleans(),
)
WILD_SUBMITS = gone_wild(
    st.builds(
        Submit,
        NAMES,
        PROMPTS,
        SAMPLINGS | SANE_SAMPLINGS | gone_wild(SANE_BEAMS, most=1),
        generated=st.lists(
            st.builds(
                GeneratedSequence,
                st.lists(TOKENS, max_size=4).map(tuple),
                st.sampled_from((None, None, FinishReason.STOP)),
                SEVERAL_LOGPROBS | st.just(()),
            ),
            max_size=1,
        ).map(tuple),
        priority=PRIORITIES,
        deadline_s=DEADLINES,
        key_hash=KEYS,
        prompt_logprobs=st.just(()) | SEVERAL_LOGPROBS,
        resubmitted=st.booleans(),
    )
)
LISTS = st.builds(
    Heartbeat,
    PLAIN[int],
    streams=st.lists(
        st.builds(StreamPosition, NAMES, st.lists(INT32, max_size=3).map(tuple)), max_size=3
    ).map(tuple),
)
CANCELS = st.builds(
    Cancel, NAMES, st.sampled_from((None, 0)) | PLAIN[int], st.sampled_from(CancelReason)
)
PINS = st.builds(Pin, NAMES, PROMPTS, key_hash=KEYS)
GATEWAY_MESSAGES = (
    SANE_SUBMITS
    | SANE_SUBMITS
    | WILD_SUBMITS
    | CANCELS
    | st.builds(Attach, NAMES, st.sampled_from((b"", b"k")))
    | st.builds(Detach, NAMES, st.booleans())
    | st.builds(Done, NAMES)
    | PINS
    | gone_wild(PINS)
    | st.builds(Unpin, NAMES, KEYS)
    | st.builds(ListPins, NAMES, KEYS)
    | LISTS
)


def reports_on(sequence_ids):
    """(sampled, row errors, scored) an executor that lies may tell of these sequences."""
    ids = st.sampled_from((*sequence_ids, 0, 999)) | PLAIN[int]
    sampled = st.builds(
        Sampled, ids, st.none() | TOKENS | PLAIN[int], st.none() | LOGPROBS | wild(PositionLogprobs)
    )
    scored = st.builds(
        Scored, ids, st.integers(0, 3) | PLAIN[int], SEVERAL_LOGPROBS | wild(Scored).map(_entries)
    )
    errors = st.builds(RowError, ids, PLAIN[str])
    return st.tuples(*(st.lists(one, max_size=5).map(tuple) for one in (sampled, errors, scored)))


def _entries(scored):
    return scored.logprobs

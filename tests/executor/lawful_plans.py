"""Plans made by hypothesis: ones that keep every law, broken in a place or two, and of anything.

A plan follows step 4, in which sequences 1 and 2 had a token drawn (2 in vain).
"""

from dataclasses import fields, is_dataclass, replace
from typing import get_type_hints

from hypothesis import strategies as st

from shared.ids import Ids
from shared.messages import PREVIOUS, Move, Row, Sample, Score, StepPlan
from shared.sampling import DrawParams
from tests.executor.plans import BOOT, LIMITS

STEP = 5
VOCAB = range(LIMITS.vocab_size)
TOKENS = st.integers(0, LIMITS.vocab_size - 1)
SOME_TOKENS = st.lists(TOKENS, max_size=4, unique=True).map(tuple)
NUMBERS = st.one_of(
    st.integers(-3, 12),
    st.sampled_from([20, 21, 23, 24, 256, 257, 511, 512, -(2**31), 2**31, 2**63, 2**64, -(2**80)]),
)
FLOATS = st.floats() | st.sampled_from([-2.0, 0.0, 0.5, 1.0, 100.0])
WORDS = st.lists(st.lists(TOKENS, min_size=1, max_size=3).map(tuple), max_size=3).map(tuple)


@st.composite
def draws(draw):
    """`DrawParams` within their limits."""
    is_plain = draw(st.booleans())
    return DrawParams(
        temperature=draw(st.sampled_from([0.0, 1e-300, 0.7, 1.0, 100.0])),
        top_p=draw(st.sampled_from([1e-300, 0.5, 1.0])),
        top_k=draw(st.sampled_from([0, 1, 50, 2**70])),
        min_p=draw(st.sampled_from([0.0, 0.1, 1.0])),
        presence_penalty=0.0 if is_plain else draw(st.floats(-2, 2)),
        frequency_penalty=0.0 if is_plain else draw(st.floats(-2, 2)),
        repetition_penalty=1.0 if is_plain else draw(st.floats(0, 100, exclude_min=True)),
        logit_bias=tuple((i, draw(st.floats(-100, 100))) for i in draw(SOME_TOKENS)),
        allowed_token_ids=draw(st.just(()) | SOME_TOKENS),
        bad_words=draw(st.just(()) | WORDS),
    )


@st.composite
def samples(draw, sequence_id, first_position, token_ids):
    """A lawful sample of a row, of which one in eight draws nothing."""
    if draw(st.integers(0, 7)) == 5:
        return Sample(sequence_id, 0, 0, None, num_top=draw(st.integers(1, 448)))
    wishes = draw(draws())
    history = ()
    if wishes.needs_history:
        before = st.lists(TOKENS, min_size=first_position, max_size=first_position)
        history = (*draw(before), *token_ids)
    return Sample(
        sequence_id=sequence_id,
        index=draw(st.integers(0, 2**63 - 1)),
        seed=draw(st.integers(-(2**63), 2**63 - 1)),
        draw=wishes,
        history=history,
        num_prompt=draw(st.integers(1, len(history))) if history else 0,
        banned_ids=draw(SOME_TOKENS),
        num_top=draw(st.none() | st.integers(0, 20)),
    )


@st.composite
def rows(draw, sequence_id, table):
    """A lawful row over blocks of its own."""
    longest = len(table) * LIMITS.block_size
    first = draw(st.integers(0, longest - 1))
    count = draw(st.integers(1, longest - first))
    ids = tuple(draw(st.lists(st.just(90) | TOKENS, min_size=count, max_size=count)))
    if sequence_id in (1, 2) and draw(st.booleans()):
        ids = (*ids[:-1], PREVIOUS)
    score = None
    if draw(st.booleans()):
        start = draw(st.integers(0, count - 1))
        after = draw(st.lists(TOKENS, min_size=1, max_size=count - start).map(tuple))
        score = Score(first + start, after, draw(st.integers(0, 20)))
    names = draw(st.sampled_from([(), (sequence_id,), (sequence_id, sequence_id + 10)]))
    return Row(
        sequence_id, ids, first, table, tuple(draw(samples(n, first, ids)) for n in names), score
    )


@st.composite
def lawful_plans(draw):
    """A plan that must run."""
    gpu = draw(st.permutations(range(LIMITS.num_gpu_blocks)))
    cpu = draw(st.permutations(range(LIMITS.num_cpu_blocks)))
    cuts = sorted(draw(st.sets(st.integers(1, 7), max_size=3)))
    tables = [tuple(gpu[a:b])[:6] for a, b in zip([0, *cuts], cuts, strict=False)]
    out, back = draw(st.integers(0, 2)), draw(st.integers(0, 2))
    fresh = gpu[cuts[-1] if cuts else 0 :]  # in no table
    return StepPlan(
        boot=BOOT,
        step_id=STEP,
        rows=tuple(draw(rows(i, table)) for i, table in enumerate(tables, 1)),
        swap_out=tuple(Move(gpu[i], cpu[i]) for i in range(out)),
        swap_in=tuple(Move(cpu[2 + i], block) for i, block in enumerate(gpu[:back])),
        copies=tuple(Move(gpu[0], block) for block in fresh if block not in gpu[: max(back, 1)])
        if draw(st.booleans())
        else (),
    )


# --------------------------------------------------------------------------- one place changed


def places(node, path=()):
    """The path of every node below `node` (dataclass fields and tuple entries)."""
    if is_dataclass(node):
        below = [(field.name, getattr(node, field.name)) for field in fields(node)]
    elif isinstance(node, tuple):
        below = list(enumerate(node))
    else:
        below = []
    for name, child in below:
        yield (*path, name), child
        yield from places(child, (*path, name))


def put(node, path, value):
    """`node` with another value at `path`."""
    if not path:
        return value
    name, *rest = path
    if is_dataclass(node):
        return replace(node, **{name: put(getattr(node, name), rest, value)})
    return (*node[:name], put(node[name], rest, value), *node[name + 1 :])


def others(node):
    """Strategy of what may stand in a node's place and still have its type on the wire."""
    if isinstance(node, float):
        return FLOATS
    if isinstance(node, int) or node is None:
        return NUMBERS
    if isinstance(node, Score | DrawParams):
        return st.none()
    if isinstance(node, tuple) and node and not isinstance(node[-1], float):  # a bias is a pair
        shorter = st.sampled_from([node[:-1], node[1:], (*node, node[-1]), (*node, node[0])])
        return shorter if not isinstance(node[0], int) else shorter | st.just((*node, 512)) | IDS
    return st.just(node)


IDS = st.lists(NUMBERS, max_size=7).map(tuple)
MAY_BE_EMPTY = ("history", "banned_ids", "token_ids", "block_table", "allowed_token_ids")


@st.composite
def wild_plans(draw):
    """A lawful plan with one to three places changed to anything."""
    plan = draw(lawful_plans())
    for _ in range(draw(st.integers(1, 3))):
        found = [
            (path, node)
            for path, node in places(plan)
            if path[-1] not in ("preemptions", "boot")
            and (node is not None or path[-1] not in ("score", "draw"))
        ]
        path, node = draw(st.sampled_from(found[::-1]))  # hypothesis likes the first ones best
        is_ids = path[-1] in MAY_BE_EMPTY
        plan = put(plan, path, draw(IDS if is_ids and node == () else others(node)))
    return plan


# --------------------------------------------------------------------------- anything at all


def any_of(message, **more):
    """A message of which every number may be any."""
    fitting = {int: NUMBERS, float: FLOATS, Ids: IDS}
    known = {
        name: fitting[hint] for name, hint in get_type_hints(message).items() if hint in fitting
    }
    return st.builds(message, **(known | more))


def some(strategy, most):
    """A tuple of up to so many."""
    return st.lists(strategy, max_size=most).map(tuple)


ANY_SAMPLES = any_of(
    Sample,
    draw=st.none()
    | st.just(DrawParams(temperature=0.0))
    | any_of(
        DrawParams,
        logit_bias=some(st.tuples(NUMBERS, FLOATS), 2),
        bad_words=some(IDS, 2),
    ),
    num_top=st.none() | NUMBERS,
)
ANY_ROWS = any_of(Row, samples=some(ANY_SAMPLES, 2), score=st.none() | any_of(Score))
ANY_MOVES = some(any_of(Move), 3)
ANY_PLANS = any_of(
    StepPlan,
    boot=st.just(BOOT), step_id=st.just(STEP) | NUMBERS, rows=some(ANY_ROWS, 3),
    preemptions=st.just(()),
    swap_out=ANY_MOVES, swap_in=ANY_MOVES, copies=ANY_MOVES,
)  # fmt: skip

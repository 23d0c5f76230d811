"""Whatever decodes may come, in any order: no law breaks, and every block comes back."""

from collections import Counter, defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.core.events import (
    AttachRequested,
    CancelRequested,
    DetachRequested,
    PinRequested,
    PinsListed,
    RequestArrived,
    RequestDone,
    StepFinished,
    StepRefused,
    StreamsListed,
    UnpinRequested,
)
from shared.codec import encode
from shared.messages import (
    Attach,
    Cancel,
    Detach,
    Done,
    Heartbeat,
    ListPins,
    Pin,
    StepFailed,
    StepResult,
    Submit,
    Unpin,
)
from tests.fuzzing import many_cases
from tests.scheduler.core.house import BOOT, House
from tests.scheduler.core.wild import GATEWAY_MESSAGES, GATEWAYS, PLAIN, on_the_wire, reports_on

HOUSES = st.fixed_dictionaries(
    {
        "num_blocks": st.integers(3, 9),
        "max_num_seqs": st.sampled_from((1, 3, 256)),
        "max_num_batched_tokens": st.sampled_from((2, 7, 512)),
        "max_scored_tokens": st.sampled_from((1, 3, 256)),
        "max_num_queued_reqs": st.sampled_from((2, 4096)),
        "join": st.booleans(),
        "scheduling_policy": st.sampled_from(("fcfs", "priority", "priority")),
        "enable_kv_bill": st.booleans(),
    }
)
WORDS = st.tuples(GATEWAYS, GATEWAY_MESSAGES)
MOVES = st.sampled_from(("step", "step", "step", "lose", "join", "tick", "gateway gone"))
pytestmark = pytest.mark.fuzz


class Listener:
    """A gateway of which no more is known than that what it is told has a wire form."""

    def __init__(self):
        self.heard = Counter()

    def hear(self, message):
        encode(message)
        self.heard[type(message).__name__] += 1


def say(house, gateway, message):
    """Give the core the event that its shell makes of this message."""
    message = on_the_wire(message)
    now = house.later()
    match message:
        case Submit():
            event = RequestArrived(now, gateway, message)
        case Cancel():
            event = CancelRequested(now, gateway, message)
        case Attach():
            event = AttachRequested(now, gateway, message)
        case Detach():
            event = DetachRequested(now, gateway, message)
        case Done(request_id):
            event = RequestDone(now, gateway, request_id)
        case Heartbeat(streams=streams):
            event = StreamsListed(now, gateway, streams)
        case Pin():
            event = PinRequested(now, gateway, message)
        case Unpin():
            event = UnpinRequested(now, gateway, message)
        case ListPins():
            event = PinsListed(now, gateway, message)
    house.handle(event)


def move(house, name):
    if name == "step" and house.in_flight:
        encode(house.in_flight[0])
        house.step()
    elif name == "lose" and house.executor is not None:
        house.lose_executor()
    elif name == "join" and house.executor is None:
        house.join()
    elif name == "tick":
        house.tick(200.0)
    elif name == "gateway gone":
        house.lose_gateway("h")


def close(house):
    """All gateways leave, and nothing stays pinned: whatever was said, nothing is left."""
    if house.executor is None:
        house.join()
    house.run()
    for gateway in "gh":
        house.lose_gateway(gateway)
    house.tick(301.0)
    core = house.core
    for prefix in list(core.book.pins):
        house.unpin(prefix.pin.pin_id, key_hash=prefix.pin.key_hash)
    assert (core.num_running, core.num_waiting, core.num_queued) == (0, 0, 0)
    assert core.num_queued_tokens == 0
    assert len(core.book) == 0
    assert house.free == house.num_blocks


@many_cases
@given(HOUSES, st.lists(WORDS | MOVES, max_size=30))
def test_no_word_of_a_gateway_breaks_anything(settings_of_house, words):
    house = House(max_model_len=40, **settings_of_house)
    house.gateways = defaultdict(Listener)
    for word in words:
        if isinstance(word, str):
            move(house, word)
        else:
            say(house, *word)
    close(house)


@many_cases
@given(HOUSES, st.data())
def test_no_word_of_an_executor_breaks_anything(settings_of_house, data):
    """It lies about tokens, log-probabilities and scores, of sequences there are and others."""
    house = House(max_model_len=40, **{**settings_of_house, "join": True})
    house.gateways = defaultdict(Listener)
    for word in data.draw(st.lists(WORDS, min_size=1, max_size=8)):
        say(house, *word)
    for _ in range(data.draw(st.integers(1, 6))):
        if house.in_flight:
            lie(house, data)
    close(house)


def lie(house, data):
    """Answer the plan in flight, or another, with whatever comes to mind."""
    plan = house.in_flight[0]
    boot = data.draw(st.sampled_from((BOOT, BOOT, BOOT, 5)))
    step_id = data.draw(st.sampled_from((plan.step_id,) * 3) | PLAIN[int])
    is_ours = (boot, step_id) == (plan.boot, plan.step_id)
    before = house.core.counters.results_dropped
    if is_ours:
        house.in_flight.pop(0)
    if data.draw(st.integers(0, 9)) == 0:
        house.handle(StepRefused(house.later(), StepFailed(boot, step_id, "cannot")))
    else:
        ids = [row.sequence_id for row in plan.rows]
        result = StepResult(boot, step_id, *data.draw(reports_on(ids)))
        house.handle(StepFinished(house.later(), on_the_wire(result)))
    assert house.core.counters.results_dropped - before == (not is_ours)

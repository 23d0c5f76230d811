"""Who is next makes others give way: pinned prefixes, and prompts that begin alike."""

import pytest

from services.scheduler.core.lifecycle import Status
from shared.ids import RequestId
from tests.scheduler.core.test_fairness import order_of_starts

RUNNING, WAITING = Status.RUNNING, Status.WAITING
COMMON = tuple(at % 20 + 1 for at in range(41))
OTHER = tuple(at % 19 + 2 for at in range(300))


@pytest.fixture(params=("fcfs", "priority"))
def policy(request):
    return request.param


@pytest.fixture
def open_house(build, policy):
    """Builds a house of either policy; a start leaves no block free."""

    def build_one(*args, **settings):
        settings = {"watermark": 0.0, "preemption_mode": "recompute", **settings}
        return build(*args, scheduling_policy=policy, **settings)

    return build_one


def submit(house, name, priority=0, prompt=4, max_tokens=8, **kwargs):
    """Under fcfs nobody has a priority."""
    if house.core.config.scheduling_policy == "fcfs":
        priority = 0
    extra = {"priority": priority}
    house.submit(name, prompt, max_tokens=max_tokens, ignore_eos=True, extra=extra, **kwargs)


def is_ready(house, name):
    return house.core.book.pins.get(RequestId(name)).is_ready


def steps_until(house, happened, most=400):
    """How many steps it takes."""
    for number in range(most):
        if happened():
            return number
        house.step()
    raise AssertionError(f"not within {most} steps")


def all_are_right(house, names):
    house.run()
    for name in names:
        assert house.answers(name) == house.solos(name), name


def preemptions(house):
    return house.core.counters.preemptions.total()


# ------------------------------------------------------------------ a pin that waits


def test_a_waiting_prefix_takes_the_blocks_of_the_last_and_starts_when_they_have_settled(
    open_house, policy
):
    house = open_house(100, 4, max_num_batched_tokens=128, max_model_len=512)
    for name in "AB":
        submit(house, name, 5, prompt=20, max_tokens=160)
    steps_until(house, lambda: house.free <= 40)
    house.pin("P", OTHER[:180], key_hash=b"other")  # 45 blocks
    submit(house, "H", 0, prompt=8, max_tokens=3)
    number = steps_until(house, lambda: is_ready(house, "P"))
    assert number == 4, "one in flight, one to settle, two of its tokens"
    assert [house.status(name) for name in "AB"] == [RUNNING, WAITING]
    assert preemptions(house) == 1
    if policy == "priority":
        assert house.tokens("H"), "who waited behind it started beside it"
    all_are_right(house, "ABH")
    assert order_of_starts(house, "ABH") == list("ABH")
    assert preemptions(house) == 1


def test_a_waiting_prefix_takes_a_seat(open_house):
    house = open_house(max_num_seqs=2)
    for name in "AB":
        submit(house, name, 5)
    house.step(2)
    house.pin("P", OTHER[:6], key_hash=b"other")
    assert steps_until(house, lambda: is_ready(house, "P")) == 3
    assert house.core.longest_wait_s(house.now) < 1, "of requests; a pin has no arrival"
    assert preemptions(house) == 1
    all_are_right(house, "AB")


def test_prompts_under_way_leave_their_tokens_to_a_waiting_prefix(open_house):
    house = open_house(32, max_num_batched_tokens=4)
    submit(house, "A", -5, prompt=40)
    house.step()
    house.pin("P", OTHER[:7], key_hash=b"other")
    house.step()
    assert {name: row[1] for name, row in house.rows().items()} == {None: 4}
    house.step()
    assert {name: row[1] for name, row in house.rows().items()} == {None: 3, "A": 1}
    all_are_right(house, "A")
    assert preemptions(house) == 0


def test_who_made_way_for_one_prefix_is_spared_by_the_next_until_it_has_a_new_token(open_house):
    house = open_house(max_num_seqs=1, max_num_batched_tokens=4)
    submit(house, "A", prompt=8)
    house.step(4)
    house.pin("P", (7,))
    steps_until(house, lambda: house.core.book.get("A").is_protected)
    before = len(house.tokens("A"))
    house.pin("Q", (8,))
    while len(house.tokens("A")) == before:
        assert (house.status("A"), is_ready(house, "Q")) == (RUNNING, False)
        house.step()
    assert steps_until(house, lambda: is_ready(house, "Q")) <= 2
    assert preemptions(house) == 2
    all_are_right(house, "A")


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_many_prefixes_one_after_the_other_stop_nobody_for_good(open_house, mode):
    house = open_house(36, max_num_seqs=3, num_cpu_blocks=24, preemption_mode=mode,
                       plans_in_flight=2, enable_prefix_caching=True)  # fmt: skip
    for name in "ABCD":
        submit(house, name, ord(name) % 3, prompt=5, max_tokens=60)
    for number in range(12):
        house.pin(f"P{number}", OTHER[number : number + 12])
        house.step(5)
        house.unpin(f"P{number}")
    assert preemptions(house) > 8
    all_are_right(house, "ABCD")


def test_a_prefix_does_not_wait_for_what_a_request_computes(open_house):
    house = open_house(200, max_num_batched_tokens=8, enable_prefix_caching=True, max_model_len=512)
    submit(house, "A", 0, prompt=OTHER, max_tokens=2)
    submit(house, "B", 0, prompt=(*COMMON, 21), max_tokens=2)
    house.step()
    if house.status("B") is WAITING:  # it starts with what A's prompt leaves of a step
        steps_until(house, lambda: house.status("B") is RUNNING)
    house.pin("P", COMMON)
    assert steps_until(house, lambda: is_ready(house, "P")) <= 7
    all_are_right(house, "AB")


# ------------------------------------------------------------------ prompts that begin alike


@pytest.fixture
def alike(build):
    """A house in which prompts that begin alike share, eight tokens to a step."""
    return build(200, max_num_batched_tokens=8, enable_prefix_caching=True, max_model_len=512,
                 scheduling_policy="priority", watermark=0.0)  # fmt: skip


def test_nobody_waits_for_a_block_that_one_of_a_greater_number_computes(alike):
    submit(alike, "L", 5, prompt=(*COMMON, 21), max_tokens=4)
    alike.step()
    submit(alike, "M", 1, prompt=OTHER, max_tokens=4)
    alike.step(2)
    submit(alike, "H", 0, prompt=(*COMMON, 22), max_tokens=60)
    assert steps_until(alike, lambda: alike.tokens("H")) <= 6
    assert alike.core.book.get("H").num_cached < 40
    assert not alike.tokens("L")
    assert not alike.tokens("M")
    steps_until(alike, lambda: alike.tokens("L"))
    of_l, of_h = alike.table("L")[:10], alike.table("H")[:10]
    assert of_l == of_h, "both computed it, and they end up on the same blocks"
    assert all(alike.ref_count(block_id) == 2 for block_id, _ in of_l)
    all_are_right(alike, "LMH")


@pytest.mark.parametrize("of_l", [0, 1])
def test_one_waits_for_a_block_of_its_own_number_or_a_lower_though_a_greater_runs(alike, of_l):
    submit(alike, "M", 5, max_tokens=60)
    submit(alike, "L", of_l, prompt=(*COMMON, 21), max_tokens=4)
    alike.step(3)
    submit(alike, "H", 1, prompt=(*COMMON, 22), max_tokens=4)
    alike.step()
    assert [alike.status(name) for name in "LMH"] == [RUNNING, RUNNING, WAITING]
    all_are_right(alike, "LMH")
    assert alike.stream("H").finished.usage.cached_tokens == 40

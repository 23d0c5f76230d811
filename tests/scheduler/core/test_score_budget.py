"""A plan scores so many tokens and no more: who gets them, and who gets the tokens left."""

from shared.messages import MAX_SCORED_TOKENS, Finished
from tests.scheduler.core.scores import asked, told


def test_a_plan_scores_so_many_tokens_and_the_rest_of_its_budget_goes_to_others(build):
    house = build(num_blocks=64, max_scored_tokens=5)
    house.submit("A", prompt=12, max_tokens=2, prompt_logprobs=0, ignore_eos=True)
    house.submit("B", prompt=12, max_tokens=2, prompt_logprobs=0, ignore_eos=True)
    house.submit("C", prompt=30, max_tokens=2, ignore_eos=True)
    house.run()
    assert asked(house, "A") == [(0, 5), (5, 5), (10, 1)]
    assert asked(house, "B") == [(0, 4), (4, 5), (9, 2)]  # the rest of the third, then its own
    for name in "ABC":
        assert house.tokens(name) == house.solo(name)
        assert told(house, name) == house.scores(name)


def test_the_default_budget_is_that_of_the_protocol(build):
    house = build(num_blocks=400, block_size=4, max_model_len=1024)
    house.submit("A", prompt=600, max_tokens=1, prompt_logprobs=0)
    house.run()
    assert asked(house, "A") == [
        (0, MAX_SCORED_TOKENS), (MAX_SCORED_TOKENS, MAX_SCORED_TOKENS), (512, 87),
    ]  # fmt: skip


def test_decodes_go_on_in_every_step_while_prompts_are_scored(build):
    house = build(num_blocks=64, max_scored_tokens=2)
    house.submit("A", prompt=3, max_tokens=9, ignore_eos=True)
    house.step()
    house.submit("B", prompt=15, max_tokens=1, prompt_logprobs=0)
    for _ in range(6):
        house.step()
        assert house.rows()["A"][1] == 1
    house.run()
    assert (told(house, "B"), house.tokens("A")) == (house.scores("B"), house.solo("A"))


def test_many_that_want_scores_all_come_to_their_end_the_oldest_first(build):
    house = build(num_blocks=64, max_scored_tokens=2)
    ends = []
    for name in "ABCDEF":
        house.submit(name, prompt=7, max_tokens=0, prompt_logprobs=1)
    while house.in_flight:
        house.step()
        ends += [message.request_id for message in house.replies(Finished)]
    assert ends == list("ABCDEF")
    for name in "ABCDEF":
        assert told(house, name) == house.scores(name)


def test_tokens_that_a_score_does_not_use_go_to_those_behind_it_in_the_same_plan(build):
    house = build(num_blocks=64, max_scored_tokens=5, max_num_batched_tokens=12)
    house.submit("A", prompt=20, max_tokens=1, prompt_logprobs=0)
    house.submit("B", prompt=20, max_tokens=1)
    house.submit("C", prompt=20, max_tokens=1)
    assert house.rows() == {"A": (0, 5, 0)}
    house.step()
    assert house.rows() == {"A": (5, 5, 0), "B": (0, 7, 0)}
    house.step()  # B is under way now, and takes what A is granted and may not use
    assert house.rows() == {"A": (10, 5, 0), "B": (7, 7, 0)}
    house.run()
    for name in "ABC":
        assert (house.tokens(name), told(house, name)) == (house.solo(name), house.scores(name))


def test_who_wants_scores_holds_up_those_behind_it_until_the_budget_has_room(build):
    """Arrival order goes first: C could run beside A, but B came before it."""
    house = build(num_blocks=64, max_scored_tokens=5)
    house.submit("A", prompt=12, max_tokens=1, prompt_logprobs=0)
    house.submit("B", prompt=12, max_tokens=1, prompt_logprobs=0)
    house.submit("C", prompt=3, max_tokens=1)
    house.step()
    assert house.rows() == {"A": (5, 5, 0)}
    house.step()
    assert house.rows() == {"A": (10, 2, 1), "B": (0, 4, 0), "C": (0, 3, 1)}

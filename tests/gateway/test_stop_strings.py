"""Stop strings against a plain model of them."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.choice_text import ChoiceText, TextRules
from services.gateway.stop_strings import StopScanner, StopStrings
from services.gateway.tokenizer import ToyTokenizer

LETTERS = st.text("ab", max_size=40)
STOPS = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4)


def scan(stops: list[str], portions: list[str]) -> tuple[str, str | None, list[str]]:
    scanner = StopScanner(StopStrings(stops))
    out = [scanner.feed(portion) for portion in portions]
    out.append(scanner.flush() if scanner.matched is None else "")
    return "".join(out), scanner.matched, out


def expected(stops: list[str], text: str) -> tuple[str, str | None]:
    """The first complete one; of several that end together, the one that begins first."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(stops=STOPS, text=LETTERS, cuts=st.lists(st.integers(0, 40), max_size=8))
def test_any_portions_give_what_the_whole_text_gives(
    stops: list[str], text: str, cuts: list[int]
) -> None:
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    portions = [text[a:b] for a, b in pairwise(edges)]
    told, matched, _ = scan(stops, portions)
    assert (told, matched) == expected(stops, text)


@given(stops=STOPS, text=LETTERS)
def test_only_possible_beginnings_are_held_back(stops: list[str], text: str) -> None:
    scanner = StopScanner(StopStrings(stops))
    out = ""
    for count, character in enumerate(text, start=1):
        out += scanner.feed(character)
        if scanner.matched:
            return
        held = text[len(out) : count]
        assert text[:count] == out + held
        assert held == "" or any(stop.startswith(held) for stop in stops)
        assert not any(
            stop.startswith(text[start:count]) for stop in stops for start in range(len(out))
        ), "a possible beginning was let out"


@pytest.mark.parametrize(
    ("stops", "text", "told", "matched"),
    [
        (["END"], "abENDcd", "ab", "END"),
        (["aab"], "aaab", "a", "aab"),
        (["abcd", "bc"], "xabcd", "xa", "bc"),
        (["bc", "abc"], "xabc", "x", "abc"),
        (["世界"], "世世界", "世", "世界"),
        (["\n\n"], "a\n\n\n", "a", "\n\n"),
        (["x"], "abc", "abc", None),
    ],
)
def test_the_first_complete_one_wins(stops, text, told, matched) -> None:
    assert scan(stops, [text])[:2] == (told, matched)


def test_nothing_comes_after_a_match() -> None:
    scanner = StopScanner(StopStrings(["."]))
    assert [scanner.feed("a.b"), scanner.feed("c"), scanner.flush()] == ["a", "", ""]


def choice(
    stops: list[str], *, silent: tuple[int, ...] = (256,), min_tokens: int = 0
) -> ChoiceText:
    return ChoiceText(ToyTokenizer(), TextRules(StopStrings(stops), frozenset(silent), min_tokens))


def test_tokens_are_counted_up_to_the_stop_string() -> None:
    text = choice(["b"])
    assert text.feed(b"aab") == "aa"
    assert text.feed(b"ccc") == ""
    assert (text.num_tokens, text.matched, text.finish()) == (3, "b", "")


def test_stop_strings_wait_for_min_tokens() -> None:
    text = choice(["a"], min_tokens=2)
    assert text.feed(b"aaba") == "aab"
    assert text.num_tokens == 4


def test_a_stop_token_is_counted_and_silent() -> None:
    text = choice(["zz"], silent=(ord("!"),))
    assert text.feed(b"az!") + text.finish() == "az"
    assert text.num_tokens == 3


def test_half_a_character_at_the_end_may_complete_a_stop_string() -> None:
    text = choice(["\ufffd"])
    assert text.feed(b"a\xe4") == "a"
    assert text.finish() == ""
    assert text.matched == "\ufffd"


@given(ids=st.lists(st.integers(0, 256), max_size=40), cut=st.integers(0, 40), stops=STOPS)
def test_a_choices_text_does_not_depend_on_portions(ids, cut, stops) -> None:
    one, two = choice(stops), choice(stops)
    whole = one.feed(ids) + one.finish()
    assert two.feed(ids[:cut]) + two.feed(ids[cut:]) + two.finish() == whole
    assert (one.num_tokens, one.matched) == (two.num_tokens, two.matched)

"""`usage.kv_bill`: what the scheduler says an answer cost in blocks, where it says so."""

import asyncio
import math

import pytest

from services.gateway.kv_bill import bill_fields
from shared.messages import KVBill
from tests.gateway.house import House

PATH = "/v1/completions"
SMALL = KVBill(3, 1, 0.25, 1, 0, 1, 0)
LARGE = KVBill(9, 3, 0.5, 2, 1, 0, 4096)
SMALL_FIELDS = {
    "peak_blocks": 3, "peak_saved_blocks": 1, "sharing_saved": 0.25, "copied_blocks": 1,
    "preemptions_swap": 0, "preemptions_recompute": 1, "swapped_bytes": 0,
}  # fmt: skip


def test_of_several_requests_peaks_are_the_highest_and_the_rest_is_summed() -> None:
    assert bill_fields([SMALL]) == SMALL_FIELDS
    assert bill_fields([SMALL, LARGE]) == {
        "peak_blocks": 9,
        "peak_saved_blocks": 3,
        "sharing_saved": (4 * 0.25 + 12 * 0.5) / 16,
        "copied_blocks": 3,
        "preemptions_swap": 1,
        "preemptions_recompute": 1,
        "swapped_bytes": 4096,
    }


@pytest.mark.parametrize("share", [math.nan, math.inf, -math.inf, 7.0, -1.0])
def test_no_scheduler_makes_it_what_json_cannot_say(share) -> None:
    told = bill_fields([KVBill(0, 0, share, 0, 0, 0, 0), KVBill(1, 0, share, 0, 0, 0, 0)])
    assert 0 <= told["sharing_saved"] <= 1


async def test_without_bills_there_is_none(house: House) -> None:
    assert "kv_bill" not in (await house.complete())["usage"]


async def test_it_stands_in_the_usage_of_whole_answers_and_at_the_end_of_streams(house) -> None:
    house.scheduler.bill = SMALL
    assert (await house.complete(n=2))["usage"]["kv_bill"] == SMALL_FIELDS
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with house.stream(PATH, prompt="Hi", n=2, stream_options=options) as events:
        *told, last, _ = await events.rest()
    assert last["usage"]["kv_bill"] == SMALL_FIELDS
    assert not any("kv_bill" in chunk["usage"] for chunk in told)


async def test_prompts_bills_are_added_up(house: House) -> None:
    house.scheduler.bill = LARGE
    bill = (await house.complete(prompt=["a", "b", "c"]))["usage"]["kv_bill"]
    assert bill == bill_fields([LARGE] * 3)
    assert (bill["peak_blocks"], bill["copied_blocks"]) == (9, 6)


@pytest.mark.parametrize("stream", [True, False])
async def test_it_is_the_last_word_though_stop_strings_end_the_answers(house, stream) -> None:
    """The second answer's end is the scheduler's answer to its cancelling, a moment later."""
    house.scheduler.holds = True
    house.scheduler.bill = SMALL
    fields = {"prompt": "Hi", "n": 2, "stop": ["."], "stream": stream}
    if stream:
        fields["stream_options"] = {"include_usage": True}
    asking = asyncio.create_task(house.http.post(house.url + PATH, json=fields))
    request_id = (await house.scheduler.submitted()).request_id
    house.scheduler.run(request_id, "ab")
    house.scheduler.finish(request_id)
    house.scheduler.bill = LARGE
    house.scheduler.run(request_id, "a.b", 1)
    async with await asking as response:
        raw = await response.text()
    assert '"peak_blocks":9' in raw
    assert raw.count("kv_bill") == 1

"""Lost messages, schedulers, clients: nobody waits for ever, nothing is told twice."""

import asyncio
import random
from pathlib import Path

import pytest

from services.gateway.readiness import LinkTimes
from shared.errors import ErrorCode
from shared.messages import (
    Cancel,
    CancelReason,
    Done,
    Drain,
    Heartbeat,
    Hello,
    Refused,
    StreamPosition,
    Submit,
    TokenRun,
    Tokens,
)
from tests.gateway.house import Held, House, held_stream, narrow, open_house, restart, text_of
from tests.gateway.scripted_scheduler import Script, ScriptedScheduler

PATH = "/v1/completions"


# ------------------------------------------------------------------ clients that leave


async def test_a_client_that_leaves_its_stream_is_cancelled(house: House) -> None:
    async with held_stream(house) as held:
        held.run("abc")
        await held.events.next()
        held.events.response.close()
    await house.scheduler.until(lambda: bool(house.scheduler.cancels(CancelReason.CLIENT_GONE)))
    assert house.scheduler.cancels(CancelReason.CLIENT_GONE) == [held.request_id]
    assert house.gateway.link.num_open == 0


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_before_any_token_is_cancelled(house, stream) -> None:
    house.scheduler.holds = True
    asking = asyncio.create_task(house.post(PATH, prompt="Hi", stream=stream))
    submit = await house.scheduler.submitted()
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await house.scheduler.until(lambda: bool(house.scheduler.cancels(CancelReason.CLIENT_GONE)))
    assert house.scheduler.cancels(CancelReason.CLIENT_GONE) == [submit.request_id]


async def test_a_client_that_left_is_not_told_of_and_late_tokens_are_cancelled_again(house) -> None:
    house.scheduler.holds = True
    async with house.stream(PATH, prompt="Hi") as events:
        submit = await house.scheduler.submitted()
        events.response.close()
    cancels = house.scheduler.cancels
    await house.scheduler.until(lambda: len(cancels(CancelReason.CLIENT_GONE)) == 1)
    house.scheduler.send(Tokens((TokenRun(submit.request_id, 0, 0, (65,)),)))
    await house.scheduler.until(lambda: len(cancels(CancelReason.CLIENT_GONE)) == 2)
    assert (await house.get("/health"))[0] == 200


async def test_three_hundred_clients_that_leave_are_all_cancelled(house: House) -> None:
    """R22's kind."""
    house.scheduler.holds = True

    async def leave() -> None:
        async with house.stream(PATH, prompt="Hi") as events:
            await events.frame()
            events.response.close()

    await asyncio.gather(*[leave() for _ in range(300)])
    asked = {submit.request_id for submit in house.scheduler.of(Submit)}
    assert len(asked) == 300
    gone = CancelReason.CLIENT_GONE
    await house.scheduler.until(lambda: set(house.scheduler.cancels(gone)) == asked, 100)
    assert house.gateway.link.num_open == 0


# ------------------------------------------------------------------ messages that get lost


async def test_lost_tokens_and_a_lost_end_come_with_a_heartbeat(held: Held) -> None:
    held.run("ab")
    held.run("cd", lost=True)
    held.run("ef")
    held.finish(lost=True)
    assert text_of(await held.events.rest()) == "abcdef"


async def test_an_end_before_its_last_tokens_waits_for_them(held: Held) -> None:
    held.run("ab", lost=True)
    held.finish()
    assert text_of(await held.events.rest()) == "ab"


async def test_repeats_are_dropped(held: Held) -> None:
    held.run("abc")
    for start, text in ((0, b"ab"), (1, b"bcd"), (0, b"abcde")):
        held.scheduler.send(Tokens((TokenRun(held.request_id, 0, start, tuple(text)),)))
    held.scheduler.logs[held.request_id][0].token_ids[:] = b"abcde"
    held.finish()
    held.finish()
    assert text_of(await held.events.rest()) == "abcde"


async def test_an_end_that_comes_after_all_is_done_is_answered_done(held: Held) -> None:
    held.finish()
    finished = held.scheduler.logs[held.request_id][0].finished
    await held.events.rest()
    await held.scheduler.until(lambda: bool(held.scheduler.of(Done)))
    count = len(held.scheduler.of(Done))  # a beat from before it may have been answered, too
    held.scheduler.send(finished)
    await held.scheduler.until(lambda: len(held.scheduler.of(Done)) > count)


async def test_a_request_the_scheduler_forgot_is_given_again(held: Held) -> None:
    """As when it took this gateway for dead."""
    held.run("ab")
    await held.events.next()
    del held.scheduler.logs[held.request_id]
    again = await held.scheduler.submitted(2)
    assert again.request_id == held.request_id
    assert bytes(again.generated[0].token_ids) == b"ab"
    held.run("cd")
    held.finish()
    assert text_of(await held.events.rest()) == "cd"


async def test_a_forgotten_request_whose_last_tokens_were_lost_is_not_over(held: Held) -> None:
    held.run("ab")
    held.run("cd", lost=True)
    held.finish()
    del held.scheduler.logs[held.request_id]
    again = await held.scheduler.submitted(2)
    assert bytes(again.generated[0].token_ids) == b"ab"
    assert again.generated[0].finish is None
    held.run("cd")
    held.finish()
    assert text_of(await held.events.rest()) == "abcd"


async def test_a_stream_that_another_gateway_took_ends_and_is_let_go(held: Held) -> None:
    held.run("ab")
    await held.events.next()
    moved = Refused(held.request_id, ErrorCode.MOVED, "another gateway has taken this stream over")
    held.scheduler.send(moved)
    told = await held.events.rest()
    assert told[-2]["error"]["code"] == "stream_moved"
    assert told[-1] == "[DONE]"
    await held.scheduler.until(lambda: held.scheduler.of(Heartbeat)[-1].streams == ())
    assert len(held.scheduler.of(Submit)) == 1
    assert held.scheduler.of(Cancel) == []
    assert held.scheduler.of(Done) == []


@pytest.mark.parametrize("welcomes_first", [True, False])
async def test_a_scheduler_that_dies_before_it_answers_loses_nothing(house, welcomes_first) -> None:
    """The next one knows nothing of the request that it finds in our beats."""
    house.scheduler.is_mute = True
    asking = asyncio.create_task(house.complete())
    await house.scheduler.submitted()
    scheduler = await restart(house)
    scheduler.holds = False
    if not welcomes_first:
        scheduler.welcomes = False
        await scheduler.until(lambda: len(scheduler.of(Heartbeat)) > 2)
        scheduler.welcomes = True
    assert (await asking)["choices"][0]["text"] == "ok"


async def test_refusals_of_beats_it_missed_do_not_end_a_request_given_again(held: Held) -> None:
    """A scheduler that slept answers all the beats it finds."""
    held.run("ab")
    await held.events.next()
    del held.scheduler.logs[held.request_id]
    await held.scheduler.submitted(2)
    for _ in range(5):
        held.scheduler.send(Refused(held.request_id, ErrorCode.UNKNOWN_REQUEST, "unknown request"))
    held.run("cd")
    held.finish()
    assert text_of(await held.events.rest()) == "cd"
    assert len(held.scheduler.of(Submit)) == 2


async def test_a_request_lost_again_and_again_ends_with_an_error(held: Held) -> None:
    no = Refused("", ErrorCode.UNKNOWN_REQUEST, "unknown request")
    await held.events.frame()
    held.scheduler.script.extend([Script(refusal=no)] * 9)
    del held.scheduler.logs[held.request_id]
    told = await held.events.rest()
    assert told[-2]["error"]["code"] == "service_unavailable"
    assert "4 times" in told[-2]["error"]["message"]
    assert told[-1] == "[DONE]"
    assert len(held.scheduler.of(Submit)) == 4


async def test_a_request_that_only_waits_survives_any_number_of_losses(held: Held) -> None:
    """It has no token to show for it, but each scheduler life took it."""
    await held.events.frame()
    for count in range(2, 9):
        del held.scheduler.logs[held.request_id]
        await held.scheduler.submitted(count)
    held.run("ab")
    held.finish()
    assert text_of(await held.events.rest()) == "ab"


async def test_a_refusal_of_a_request_given_again_is_believed(held: Held) -> None:
    full = Refused("", ErrorCode.QUEUE_FULL, "256 requests wait already")
    await held.events.frame()
    held.scheduler.script.append(Script(refusal=full))
    del held.scheduler.logs[held.request_id]
    told = await held.events.rest()
    assert told[-2]["error"]["code"] == "queue_full"
    assert told[-1] == "[DONE]"
    assert len(held.scheduler.of(Submit)) == 2


async def test_a_message_that_is_not_for_gateways_is_dropped_and_counted(house: House) -> None:
    house.scheduler.send(Drain())
    assert (await house.complete())["choices"][0]["text"] == "ok"
    async with house.http.get(house.url + "/metrics") as response:
        page = await response.text()
    assert 'splitflap:messages_dropped_total{link="request",reason="unknown"}' in page


async def test_what_could_not_be_sent_is_sent_when_the_connection_is_back(house: House) -> None:
    """The same scheduler life, out of reach for a moment: a cancel and a request wait."""
    house.scheduler.holds = True
    leaving = asyncio.create_task(house.post(PATH, prompt="leaves"))
    left = await house.scheduler.submitted()
    await house.scheduler.close()
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    staying = asyncio.create_task(house.complete(prompt="stays"))
    async with asyncio.timeout(5):
        while house.gateway.link.num_open != 1:  # one left, one came
            await asyncio.sleep(0)
    house.scheduler = ScriptedScheduler(house.endpoint, boot=house.scheduler.boot)
    assert (await staying)["choices"][0]["text"] == "ok"
    gone = CancelReason.CLIENT_GONE
    await house.scheduler.until(lambda: house.scheduler.cancels(gone) == [left.request_id])


# ------------------------------------------------------------------ schedulers that get lost


async def test_a_stream_goes_on_with_the_next_scheduler(house: House) -> None:
    house.scheduler.holds = True
    async with house.stream(PATH, prompt="Hi", seed=7, max_tokens=50) as events:
        first = await house.scheduler.submitted()
        house.scheduler.run(first.request_id, "Hello")
        assert text_of([await events.next()]) == "Hello"
        scheduler = await restart(house)
        again = await scheduler.submitted()
        assert again.request_id == first.request_id
        assert again.prompt == first.prompt
        assert again.sampling == first.sampling
        assert bytes(again.generated[0].token_ids) == b"Hello"
        assert again.generated[0].finish is None
        assert again.age_s > first.age_s
        scheduler.run(again.request_id, " world")
        scheduler.finish(again.request_id)
        told = await events.rest()
    assert text_of(told) == " world"
    assert told[-1] == "[DONE]"


async def test_half_a_character_survives_a_restart(held: Held) -> None:
    held.run(b"A\xf0\x9f")
    assert text_of([await held.events.next()]) == "A"
    await (await restart(held.house)).submitted()
    held.run(b"\x98\x80")
    held.finish()
    assert text_of(await held.events.rest()) == "😀"


async def test_a_plain_request_survives_a_restart_too(house: House) -> None:
    house.scheduler.holds = True
    asking = asyncio.create_task(house.complete())
    submit = await house.scheduler.submitted()
    house.scheduler.run(submit.request_id, "ab")
    at = StreamPosition(submit.request_id, (2,))
    await house.scheduler.until(
        lambda: any(at in beat.streams for beat in house.scheduler.of(Heartbeat))
    )
    scheduler = await restart(house)
    again = await scheduler.submitted()
    assert bytes(again.generated[0].token_ids) == b"ab"
    scheduler.run(submit.request_id, "cd")
    scheduler.finish(submit.request_id)
    assert (await asking)["choices"][0]["text"] == "abcd"


async def test_streams_end_with_an_error_when_no_scheduler_comes_back(tmp_path: Path) -> None:
    times = LinkTimes(beat_s=0.02, silent_s=0.1, lost_s=0.3)
    async with open_house(tmp_path, times=times) as house:
        house.scheduler.holds = True
        async with house.stream(PATH, prompt="Hi") as events:
            await house.scheduler.submitted()
            await house.scheduler.close()
            told = await events.rest()
        assert told[-2]["error"]["code"] == "service_unavailable"
        assert told[-1] == "[DONE]"


async def test_open_streams_and_their_positions_are_listed(held: Held) -> None:
    held.run("abc")
    await held.is_listed_at(3)
    held.finish()
    await held.events.rest()
    await held.scheduler.until(lambda: held.scheduler.of(Heartbeat)[-1].streams == ())


async def test_it_presents_itself_with_every_beat(house: House) -> None:
    """A scheduler that took a paused gateway for dead has forgotten it."""
    before = len(house.scheduler.of(Hello))
    await house.scheduler.until(lambda: len(house.scheduler.of(Hello)) >= before + 3)


# ------------------------------------------------------------------ waiting and slow reading


async def test_a_waiting_stream_is_pinged(tmp_path: Path) -> None:
    async with open_house(tmp_path, ping_interval_s=0.05) as house:
        house.scheduler.holds = True
        async with house.stream(PATH, prompt="Hi") as events:
            submit = await house.scheduler.submitted()
            assert [await events.frame() for _ in range(3)] == [[": ping"]] * 3
            house.scheduler.run(submit.request_id, "abc")
            house.scheduler.finish(submit.request_id)
            assert text_of(await events.rest()) == "abc"


async def test_a_stream_whose_tokens_are_no_text_is_pinged_too(tmp_path: Path) -> None:
    async with open_house(tmp_path, ping_interval_s=0.1) as house:
        house.scheduler.holds = True
        async with house.stream(PATH, prompt="Hi") as events:
            submit = await house.scheduler.submitted()
            assert await events.frame() == [": ping"], "the opening"

            async def bos_again_and_again() -> None:
                while True:
                    house.scheduler.run(submit.request_id, (257,))
                    await asyncio.sleep(0.01)

            sending = asyncio.create_task(bos_again_and_again())
            assert [await events.frame() for _ in range(2)] == [[": ping"]] * 2
            sending.cancel()


async def test_a_client_that_reads_nothing_holds_up_nobody(tmp_path: Path) -> None:
    """Its tokens are kept (as ids, at most max_tokens of them), and come when it reads."""
    patient = LinkTimes(beat_s=0.05, silent_s=30.0)
    options = {"max_model_len": 10**7}
    async with open_house(tmp_path, times=patient, scheduler_options=options) as house:
        house.scheduler.holds = True
        reader, writer = await asyncio.open_connection(sock=narrow(house), limit=2**12)
        try:
            body = (
                b'{"prompt": "Hi", "stream": true, "max_tokens": 9000000, "return_token_ids": true}'
            )
            writer.write(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: "
                b"application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
            )
            submit = await house.scheduler.submitted()
            for _ in range(8):  # more than the kernel's buffers hold
                house.scheduler.run(submit.request_id, b"x" * 200_000)
            house.scheduler.finish(submit.request_id)
            house.scheduler.holds = False
            assert (await house.complete())["choices"][0]["text"] == "ok"
            done = [message.request_id for message in house.scheduler.of(Done)]
            assert submit.request_id not in done, "it still has something to tell its client"
            told = await reader.read()
            assert told.count(b"x") >= 1_600_000
            assert b"data: [DONE]" in told
        finally:
            writer.close()
            await writer.wait_closed()


# ------------------------------------------------------------------ everything at once


@pytest.mark.parametrize("seed", range(3))
async def test_every_stream_is_whole_through_losses_and_restarts(tmp_path, seed: int) -> None:
    """40 streams; 4 in 10 messages lost; two schedulers die; some clients leave."""
    dice = random.Random(seed)

    def answer(submit: Submit) -> bytes:
        return (bytes(submit.prompt) + " 世界 😀 ".encode()) * 20

    def lossy(house: House) -> None:
        house.scheduler.answer, house.scheduler.dice = answer, dice

    async def one(house: House, number: int) -> None:
        prompt = f"stream {number}"
        leaves_after = dice.randrange(1, 10) if number % 5 == 0 else None
        async with house.stream(PATH, prompt=prompt, max_tokens=1000, stop="nowhere") as events:
            told = []
            while event := await events.next():
                told.append(event)
                if len(told) == leaves_after:
                    events.response.close()
                    return
        assert text_of(told) == (prompt + " 世界 😀 ") * 20
        assert told[-1] == "[DONE]"

    async with open_house(tmp_path, times=LinkTimes(beat_s=0.02, silent_s=2.0)) as house:
        lossy(house)
        streams = [asyncio.create_task(one(house, number)) for number in range(40)]
        for _ in range(2):
            beats = len(house.scheduler.of(Heartbeat))
            await house.scheduler.until(
                lambda beats=beats: len(house.scheduler.of(Heartbeat)) > beats + 5
            )
            await restart(house)
            lossy(house)
        await asyncio.gather(*streams)
        scheduler = house.scheduler
        await scheduler.until(lambda: not scheduler.logs)
        assert house.gateway.link.num_open == 0

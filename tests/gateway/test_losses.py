"""Lost messages, schedulers, clients: nobody waits for ever, nothing is told twice."""

import asyncio
import random
from pathlib import Path

import pytest

from services.gateway.link import LinkTimes
from shared.errors import ErrorCode
from shared.messages import (
    CancelReason,
    Done,
    Drain,
    Heartbeat,
    Hello,
    Refused,
    Submit,
    TokenRun,
    Tokens,
)
from tests.gateway.house import House, open_house, text_of, until_ready
from tests.gateway.scripted_scheduler import Script, ScriptedScheduler

PATH = "/v1/completions"


async def restart(house: House, **options) -> ScriptedScheduler:
    """Another scheduler life on the same endpoint; it knows nothing."""
    await house.scheduler.close()
    house.scheduler = ScriptedScheduler(house.endpoint, **options)
    house.scheduler.holds = True
    return house.scheduler


# ------------------------------------------------------------------ clients that leave


async def test_a_client_that_leaves_its_stream_is_cancelled(house: House) -> None:
    house.scheduler.holds = True
    async with house.stream(PATH, prompt="Hi") as events:
        submit = await house.scheduler.submitted()
        house.scheduler.run(submit.request_id, "abc")
        await events.next()
        events.response.close()
    await house.scheduler.until(lambda: bool(house.scheduler.cancels(CancelReason.CLIENT_GONE)))
    assert house.scheduler.cancels(CancelReason.CLIENT_GONE) == [submit.request_id]
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
    gone = CancelReason.CLIENT_GONE
    await house.scheduler.until(lambda: len(house.scheduler.cancels(gone)) == 300)
    asked = {submit.request_id for submit in house.scheduler.of(Submit)}
    assert set(house.scheduler.cancels(gone)) == asked
    assert house.gateway.link.num_open == 0


# ------------------------------------------------------------------ messages that get lost


async def test_lost_tokens_and_a_lost_end_come_with_a_heartbeat(house: House) -> None:
    house.scheduler.holds = True
    async with house.stream(PATH, prompt="Hi") as events:
        submit = await house.scheduler.submitted()
        house.scheduler.run(submit.request_id, "ab")
        house.scheduler.run(submit.request_id, "cd", lost=True)
        house.scheduler.run(submit.request_id, "ef")
        house.scheduler.finish(submit.request_id, lost=True)
        assert text_of(await events.rest()) == "abcdef"


async def test_an_end_before_its_last_tokens_waits_for_them(house: House) -> None:
    house.scheduler.holds = True
    async with house.stream(PATH, prompt="Hi") as events:
        submit = await house.scheduler.submitted()
        house.scheduler.run(submit.request_id, "ab", lost=True)
        house.scheduler.finish(submit.request_id)
        assert text_of(await events.rest()) == "ab"


async def test_repeats_are_dropped(house: House) -> None:
    house.scheduler.holds = True
    async with house.stream(PATH, prompt="Hi") as events:
        submit = await house.scheduler.submitted()
        house.scheduler.run(submit.request_id, "abc")
        for start, text in ((0, b"ab"), (1, b"bcd"), (0, b"abcde")):
            house.scheduler.send(Tokens((TokenRun(submit.request_id, 0, start, tuple(text)),)))
        house.scheduler.logs[submit.request_id].token_ids[:] = b"abcde"
        house.scheduler.finish(submit.request_id)
        house.scheduler.finish(submit.request_id)
        assert text_of(await events.rest()) == "abcde"


async def test_an_end_that_comes_after_all_is_done_is_answered_done(house: House) -> None:
    house.scheduler.holds = True
    async with house.stream(PATH, prompt="Hi") as events:
        submit = await house.scheduler.submitted()
        house.scheduler.finish(submit.request_id)
        finished = house.scheduler.logs[submit.request_id].finished
        await events.rest()
    await house.scheduler.until(lambda: len(house.scheduler.of(Done)) == 1)
    house.scheduler.send(finished)
    await house.scheduler.until(lambda: len(house.scheduler.of(Done)) == 2)


async def test_a_request_the_scheduler_forgot_is_given_again(house: House) -> None:
    """As when it took this gateway for dead."""
    house.scheduler.holds = True
    async with house.stream(PATH, prompt="Hi") as events:
        first = await house.scheduler.submitted()
        house.scheduler.run(first.request_id, "ab")
        await events.next()
        del house.scheduler.logs[first.request_id]
        again = await house.scheduler.submitted(2)
        assert again.request_id == first.request_id
        assert bytes(again.generated[0].token_ids) == b"ab"
        house.scheduler.run(first.request_id, "cd")
        house.scheduler.finish(first.request_id)
        assert text_of(await events.rest()) == "cd"


async def test_a_forgotten_request_whose_last_tokens_were_lost_is_not_over(house: House) -> None:
    house.scheduler.holds = True
    async with house.stream(PATH, prompt="Hi") as events:
        first = await house.scheduler.submitted()
        house.scheduler.run(first.request_id, "ab")
        house.scheduler.run(first.request_id, "cd", lost=True)
        house.scheduler.finish(first.request_id)
        del house.scheduler.logs[first.request_id]
        again = await house.scheduler.submitted(2)
        assert bytes(again.generated[0].token_ids) == b"ab"
        assert again.generated[0].finish is None
        house.scheduler.run(first.request_id, "cd")
        house.scheduler.finish(first.request_id)
        assert text_of(await events.rest()) == "abcd"


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


async def test_refusals_of_beats_it_missed_do_not_end_a_request_given_again(house: House) -> None:
    """A scheduler that slept answers all the beats it finds."""
    house.scheduler.holds = True
    async with house.stream(PATH, prompt="Hi") as events:
        submit = await house.scheduler.submitted()
        house.scheduler.run(submit.request_id, "ab")
        await events.next()
        del house.scheduler.logs[submit.request_id]
        await house.scheduler.submitted(2)
        for _ in range(5):
            no = Refused(submit.request_id, ErrorCode.UNAVAILABLE, "unknown request")
            house.scheduler.send(no)
        house.scheduler.run(submit.request_id, "cd")
        house.scheduler.finish(submit.request_id)
        assert text_of(await events.rest()) == "cd"
    assert len(house.scheduler.of(Submit)) == 2


async def test_a_request_refused_again_and_again_ends_with_an_error(house: House) -> None:
    house.scheduler.holds = True
    no = Refused("", ErrorCode.UNAVAILABLE, "no executor for 60 s")
    async with house.stream(PATH, prompt="Hi") as events:
        submit = await house.scheduler.submitted()
        await events.frame()
        house.scheduler.script.extend([Script(refusal=no)] * 9)
        del house.scheduler.logs[submit.request_id]
        told = await events.rest()
    assert told[-2]["error"]["code"] == "service_unavailable"
    assert told[-1] == "[DONE]"
    assert len(house.scheduler.of(Submit)) == 4


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


async def test_half_a_character_survives_a_restart(house: House) -> None:
    house.scheduler.holds = True
    async with house.stream(PATH, prompt="Hi") as events:
        submit = await house.scheduler.submitted()
        house.scheduler.run(submit.request_id, b"A\xf0\x9f")
        assert text_of([await events.next()]) == "A"
        scheduler = await restart(house)
        await scheduler.submitted()
        scheduler.run(submit.request_id, b"\x98\x80")
        scheduler.finish(submit.request_id)
        assert text_of(await events.rest()) == "😀"


async def test_a_plain_request_survives_a_restart_too(house: House) -> None:
    house.scheduler.holds = True
    asking = asyncio.create_task(house.complete())
    submit = await house.scheduler.submitted()
    house.scheduler.run(submit.request_id, "ab")
    scheduler = await restart(house)
    await scheduler.submitted()
    scheduler.run(submit.request_id, "cd")
    scheduler.finish(submit.request_id)
    assert (await asking)["choices"][0]["text"] in ("abcd", "cd")


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


async def test_without_a_scheduler_requests_are_503_and_readiness_says_why(tmp_path: Path) -> None:
    times = LinkTimes(beat_s=0.02, silent_s=0.1)
    async with open_house(tmp_path, times=times) as house:
        await house.scheduler.close()
        async with asyncio.timeout(5):
            while (await house.get("/health/ready"))[0] == 200:
                await asyncio.sleep(0.02)
        status, told = await house.get("/health/ready")
        assert (status, told["phase"]) == (503, "waiting for the scheduler")
        assert (await house.get("/health/live"))[0] == 200
        async with house.http.post(house.url + PATH, json={"prompt": "x"}) as response:
            assert response.status == 503
            assert int(response.headers["Retry-After"]) >= 1
            assert (await response.json())["error"]["code"] == "service_unavailable"
        house.scheduler = ScriptedScheduler(house.endpoint)
        await until_ready(house)
        assert (await house.complete())["choices"][0]["text"] == "ok"


async def test_the_phase_is_the_schedulers_until_it_says_welcome(tmp_path: Path) -> None:
    async with open_house(tmp_path) as house:
        scheduler = await restart(house)
        scheduler.welcomes = False
        scheduler.phase = "loading weights 41 %"
        async with asyncio.timeout(5):
            while (told := await house.get("/health/ready"))[1].get("phase") != scheduler.phase:
                await scheduler.until_next()
        assert told[0] == 503
        scheduler.welcomes = True
        await until_ready(house)


@pytest.mark.parametrize(
    ("options", "said"),
    [({"model": "smollm2"}, "--model toy"), ({"vocab": 100}, "258 tokens")],
)
async def test_another_model_than_the_tokenizers_is_not_ready(tmp_path, options, said) -> None:
    async with open_house(tmp_path) as house:
        scheduler = await restart(house, **options)
        async with asyncio.timeout(5):
            while said not in (await house.get("/health/ready"))[1].get("phase", ""):
                await scheduler.until_next()
        assert (await house.post(PATH, prompt="x"))[0] == 503


async def test_open_streams_and_their_positions_are_listed(house: House) -> None:
    house.scheduler.holds = True
    async with house.stream(PATH, prompt="Hi") as events:
        submit = await house.scheduler.submitted()
        house.scheduler.run(submit.request_id, "abc")
        await house.scheduler.until(
            lambda: any(
                stream.request_id == submit.request_id and stream.positions == (3,)
                for beat in house.scheduler.of(Heartbeat)
                for stream in beat.streams
            )
        )
        house.scheduler.finish(submit.request_id)
        await events.rest()
    count = len(house.scheduler.of(Heartbeat))
    await house.scheduler.until(lambda: len(house.scheduler.of(Heartbeat)) > count + 1)
    assert house.scheduler.of(Heartbeat)[-1].streams == ()


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
        reader, writer = await asyncio.open_connection(*house.gateway.address, limit=2**12)
        try:
            body = b'{"prompt": "Hi", "stream": true, "max_tokens": 9000000}'
            writer.write(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: "
                b"application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
            )
            submit = await house.scheduler.submitted()
            for _ in range(8):  # more than the kernel's buffers hold
                house.scheduler.run(submit.request_id, b"x" * 1_000_000)
            house.scheduler.finish(submit.request_id)
            house.scheduler.holds = False
            assert (await house.complete())["choices"][0]["text"] == "ok"
            done = [message.request_id for message in house.scheduler.of(Done)]
            assert submit.request_id not in done, "it still has something to tell its client"
            told = await reader.read()
            assert told.count(b"x") >= 8_000_000
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

"""The file of API keys: hashed, reloaded, and what each of them may ask."""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
import structlog

from services.cli import main
from services.gateway.allowance import Allowance, Bucket
from services.gateway.failures import Failure
from services.gateway.key_file import Limits, new_key, read_keys
from services.gateway.keys import ApiKeys
from shared.errors import StartError
from shared.messages import Submit
from tests.gateway.house import House, open_house


def write(path: Path, **keys: Limits) -> dict[str, str]:
    """A file of new keys; returns them by name."""
    made = {name: new_key(name, limits) for name, limits in keys.items()}
    path.write_text("\n".join(entry for _, entry in made.values()))
    path.chmod(0o600)
    return {name: key for name, (key, _) in made.items()}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@asynccontextmanager
async def house_of(tmp_path: Path, **limits: Any) -> AsyncIterator[tuple[House, str]]:
    """A gateway whose one key has these limits, and that key."""
    file = tmp_path / "keys.toml"
    key = write(file, alice=Limits(**limits))["alice"]
    async with open_house(tmp_path, api_key_file=file) as house:
        yield house, key


async def ask(house: House, key: str, **fields: Any) -> tuple[int, dict[str, Any], Any]:
    body = {"prompt": "Hi", "max_tokens": 4, **fields}
    async with house.http.post(
        house.url + "/v1/completions", json=body, headers=bearer(key)
    ) as response:
        return response.status, await response.json(), response.headers


def names_limit(answer: tuple[int, dict[str, Any], Any], limit: str) -> float:
    """Its Retry-After."""
    status, told, headers = answer
    assert (status, told["error"]["code"]) == (429, "rate_limit_exceeded"), told
    assert limit in told["error"]["message"]
    return float(headers["Retry-After"])


# ------------------------------------------------------------------ through a gateway


async def test_a_key_of_the_file_opens_and_only_that(tmp_path: Path) -> None:
    async with house_of(tmp_path) as (house, key):
        assert (await ask(house, key))[0] == 200
        assert (await ask(house, key + "x"))[0] == 401
        (submit,) = house.scheduler.of(Submit)
        assert submit.key_hash == hashlib.sha256(key.encode()).digest()[:16]


async def test_keys_of_the_flag_and_of_the_file_are_good_together(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    key = write(file, alice=Limits(requests_per_minute=1))["alice"]
    async with open_house(tmp_path, api_key_file=file, api_key=("sk-flag",)) as house:
        answers = [(await ask(house, each))[0] for each in (key, key, "sk-flag", "sk-flag")]
    assert answers == [200, 429, 200, 200]  # those of the flag have no limits


async def test_the_log_has_the_name_and_not_the_key(tmp_path: Path) -> None:
    with structlog.testing.capture_logs() as events:
        async with house_of(tmp_path, requests_per_minute=1) as (house, key):
            await ask(house, key)
            await ask(house, key)
    done = [event for event in events if event["event"] == "request_finished"]
    posts = [(event["status"], event["key"]) for event in done if event["method"] == "POST"]
    assert posts == [(200, "alice"), (429, "alice")]
    assert key not in repr(events)


async def test_requests_per_minute(tmp_path: Path) -> None:
    async with house_of(tmp_path, requests_per_minute=2) as (house, key):
        assert [(await ask(house, key))[0] for _ in range(2)] == [200, 200]
        retry_after = names_limit(await ask(house, key), "requests_per_minute")
        assert 25 <= retry_after <= 30
        async with house.http.get(house.url + "/v1/models", headers=bearer(key)) as response:
            assert response.status == 200  # only POSTs count
        rejected = 'requests_rejected_total{reason="rate_limit_exceeded"}'
        async with house.http.get(house.url + "/metrics", headers=bearer(key)) as response:
            assert f"splitflap:{rejected}" in await response.text()
        assert len(house.scheduler.of(Submit)) == 2


async def test_the_official_client_knows_it_as_a_rate_limit(tmp_path: Path) -> None:
    async with house_of(tmp_path, requests_per_minute=1) as (house, key):
        url = house.url + "/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as client:
            await client.completions.create(model="toy", prompt="Hi")
            with pytest.raises(openai.RateLimitError) as caught:
                await client.completions.create(model="toy", prompt="Hi")
    assert caught.value.code == "rate_limit_exceeded"


async def test_max_concurrent_requests_until_a_client_leaves(tmp_path: Path) -> None:
    async with house_of(tmp_path, max_concurrent_requests=1) as (house, key):
        house.scheduler.holds = True
        first = asyncio.create_task(ask(house, key, stream=True))
        await house.scheduler.submitted(1)
        assert names_limit(await ask(house, key), "max_concurrent_requests") == 1
        first.cancel()
        house.scheduler.holds = False
        async with asyncio.timeout(10):
            while (await ask(house, key))[0] == 429:
                await asyncio.sleep(0.01)


async def test_a_stream_that_goes_on_is_open_and_no_new_request(tmp_path: Path) -> None:
    async with house_of(tmp_path, max_concurrent_requests=1, requests_per_minute=1) as (house, key):
        house.scheduler.holds = True
        first = asyncio.create_task(ask(house, key, stream=True))
        await house.scheduler.submitted(1)
        url = f"{house.url}/v1/streams/cmpl-{'0' * 32}"
        async with house.http.get(url, headers=bearer(key)) as response:
            answer = response.status, await response.json(), response.headers
        names_limit(answer, "max_concurrent_requests")
        first.cancel()
        async with asyncio.timeout(10):
            while True:
                async with house.http.get(url, headers=bearer(key)) as response:
                    if response.status != 429:
                        break
        assert response.status == 404  # nobody has it, but asking is allowed
        names_limit(await ask(house, key), "requests_per_minute")


async def test_tokens_per_minute_counts_prompts_and_answers(tmp_path: Path) -> None:
    async with house_of(tmp_path, tokens_per_minute=60) as (house, key):
        status, told, _ = await ask(house, key, prompt="x" * 30)
        assert status == 200
        used = told["usage"]["total_tokens"]
        assert 30 < used < 60
        assert (await ask(house, key, prompt="x" * 90))[0] == 200  # begun before all was used
        retry_after = names_limit(await ask(house, key), "tokens_per_minute")
        assert used + 90 - 60 <= retry_after <= used + 90 - 60 + 12


async def test_a_prefix_is_counted_too(tmp_path: Path) -> None:
    async with house_of(tmp_path, tokens_per_minute=10) as (house, key):
        pin = asyncio.create_task(
            house.http.post(
                house.url + "/v1/prefixes", json={"prompt": "x" * 50}, headers=bearer(key)
            )
        )
        async with asyncio.timeout(10):
            while (answer := await ask(house, key))[0] != 429:
                await asyncio.sleep(0.01)
        assert names_limit(answer, "tokens_per_minute") > 30
        pin.cancel()


async def test_a_refused_request_is_not_counted(tmp_path: Path) -> None:
    async with house_of(tmp_path, requests_per_minute=600, max_concurrent_requests=1) as (house, k):
        house.scheduler.holds = True
        first = asyncio.create_task(ask(house, k, stream=True))
        await house.scheduler.submitted(1)
        for _ in range(5):
            names_limit(await ask(house, k), "max_concurrent_requests")
        first.cancel()


async def test_a_changed_file_is_taken_and_a_broken_one_is_not(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    old = write(file, alice=Limits())["alice"]
    async with open_house(tmp_path, api_key_file=file) as house:
        new = write(file, bob=Limits())["bob"]
        assert [(await ask(house, key))[0] for key in (old, new)] == [200, 401]
        house.gateway.keys.reload()
        assert [(await ask(house, key))[0] for key in (old, new)] == [401, 200]
        file.write_text("[bob]\nsha256 = 'no'\n")
        with structlog.testing.capture_logs() as events:
            house.gateway.keys.reload()
        assert [event["event"] for event in events] == ["api_keys_not_reloaded"]
        assert (await ask(house, new))[0] == 200
        file.write_text("")
        house.gateway.keys.reload()
        assert (await ask(house, new))[0] == 401  # no keys: nobody, not everybody


async def test_what_was_used_stays_used_when_the_file_is_read_again(tmp_path: Path) -> None:
    async with house_of(tmp_path, requests_per_minute=1) as (house, key):
        assert (await ask(house, key))[0] == 200
        house.gateway.keys.reload()
        assert (await ask(house, key))[0] == 429


# ------------------------------------------------------------------ the file

DIGEST = "ab" * 32


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[a]\n", "a: sha256 must be"),
        ("[a]\nsha256 = 'sk-secret'\n", "a: sha256 must be"),
        (f"[a]\nsha256 = '{DIGEST.upper()}'\n", "lower case"),
        (f"[a]\nsha256 = '{DIGEST}'\nrequests = 1\n", "no field is called requests"),
        (f"[a]\nsha256 = '{DIGEST}'\nrequests_per_minute = 0\n", "at least 1"),
        (f"[a]\nsha256 = '{DIGEST}'\nrequests_per_minute = true\n", "whole number"),
        (f"[a]\nsha256 = '{DIGEST}'\n[b]\nsha256 = '{DIGEST}'\n", "a and b have the same key"),
        ("a = 1\n", "is no table"),
        ("[a\n", "as TOML"),
        ("[a]\nsha256 = 'x'\n[a]\nsha256 = 'y'\n", "as TOML"),
        (None, "No such file"),
    ],
)
def test_what_is_wrong_in_a_file_is_named_and_no_secret_told(tmp_path, text, complaint) -> None:
    file = tmp_path / "keys.toml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(StartError, match=complaint) as caught:
        ApiKeys((), file)
    assert "sk-secret" not in str(caught.value)


def test_a_file_that_others_may_write_is_refused_and_one_they_may_read_warned_of(tmp_path) -> None:
    file = tmp_path / "keys.toml"
    write(file, alice=Limits())
    file.chmod(0o620)
    with pytest.raises(StartError, match="others may write to it"):
        read_keys(file)
    file.chmod(0o644)
    with structlog.testing.capture_logs() as events:
        read_keys(file)
    assert [event["event"] for event in events] == ["api_key_file_is_readable_by_all"]


def test_the_file_holds_no_key(tmp_path) -> None:
    file = tmp_path / "keys.toml"
    key = write(file, alice=Limits())["alice"]
    assert key.startswith("sk-")
    assert len(key) > 43  # 256 bits
    assert key not in file.read_text()
    assert key.removeprefix("sk-") not in file.read_text()


# ------------------------------------------------------------------ splitflap keys


def test_the_command_tells_the_key_once_and_its_entry_goes_to_a_file(tmp_path, capsys) -> None:
    file = tmp_path / "keys.toml"
    assert main(["keys", "api", "--name", "alice", "--tokens-per-minute=7"]) == 0
    first = capsys.readouterr()
    file.write_text(first.out)  # as `>>` does
    file.chmod(0o600)
    assert main(["keys", "api", "--name=bob", "--out", str(file)]) == 0
    second = capsys.readouterr()
    assert second.out == ""
    alice, bob = read_keys(file)
    assert (alice.name, alice.limits) == ("alice", Limits(tokens_per_minute=7))
    assert (bob.name, bob.limits) == ("bob", Limits())
    keys = ApiKeys((), file)
    for told, name in ((first.err, "alice"), (second.err, "bob")):
        holder = keys.holder_of([f"Bearer {told.splitlines()[-1]}"])
        assert holder is not None
        assert holder.name == name


def test_a_new_file_is_its_owners_alone_and_a_name_is_taken_once(tmp_path, capsys) -> None:
    file = tmp_path / "keys.toml"
    assert main(["keys", "api", "--name=bob", "--out", str(file)]) == 0
    assert file.stat().st_mode & 0o777 == 0o600
    before = file.read_text()
    assert main(["keys", "api", "--name=bob", "--out", str(file)]) == 2
    assert "has a key of bob already" in capsys.readouterr().err
    assert file.read_text() == before


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ([], "no kind of key is called ''"),
        (["ssh"], "there are api and curve"),
        (["api"], "--name: must be given"),
        (["api", "--name", "a b"], "letters, digits"),
        (["api", "--name", "a", "--requests-per-minute", "0"], "at least 1"),
        (["curve"], "--out: must be given"),
    ],
)
def test_what_cannot_be_made_is_said(capsys, flags, complaint) -> None:
    assert main(["keys", *flags]) == 2
    assert complaint in capsys.readouterr().err


def test_curve_keys_are_made_by_the_command(tmp_path, capsys) -> None:
    assert main(["keys", "curve", "--out", str(tmp_path / "keys")]) == 0
    told = capsys.readouterr()
    assert sorted(told.out.split()) == sorted(map(str, (tmp_path / "keys").iterdir()))
    assert "--curve-key-dir" in told.err
    assert main(["keys", "curve", "--out", str(tmp_path / "keys")]) == 2


# ------------------------------------------------------------------ counting


def test_a_bucket_comes_back_evenly_and_never_overflows() -> None:
    bucket = Bucket(60, now=0.0)
    bucket.take(60, 0.0)
    assert bucket.wait_s(1, 0.0) == 1.0
    assert bucket.wait_s(1, 1.0) == 0.0
    assert bucket.wait_s(1000, 0.0) == 60.0  # more than there ever is: all of it
    bucket.take(60, 1000.0)  # filled long ago, and no further
    assert bucket.wait_s(1, 1000.0) == 1.0


def test_what_was_taken_beyond_a_bucket_comes_back_too() -> None:
    bucket = Bucket(60, now=0.0)
    bucket.take(180, 0.0)
    assert bucket.wait_s(1, 0.0) == pytest.approx(121)
    assert bucket.wait_s(1, 121.0) == 0.0


@pytest.mark.parametrize(("before", "after", "left"), [(10, 20, 15), (20, 10, -5), (10, 4, -1)])
def test_another_limit_leaves_what_was_used(before: int, after: int, left: int) -> None:
    bucket = Bucket(before, now=0.0)
    bucket.take(before - 10 + 5, 0.0)
    bucket.resize(after, 0.0)
    expected = (1 - left) * 60 / after if left < 1 else 0.0
    assert bucket.wait_s(1, 0.0) == pytest.approx(max(0.0, expected))


def test_retry_after_is_long_enough() -> None:
    now = [0.0]
    allowance = Allowance(Limits(requests_per_minute=7), lambda: now[0])
    for _ in range(30):
        try:
            with allowance.one_request():
                pass
        except Failure as failure:
            now[0] += float(failure.headers["Retry-After"])
            with allowance.one_request():
                pass

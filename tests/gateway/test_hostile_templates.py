"""A chat template may be anybody's: it hangs no gateway, fills no memory and gets at nothing."""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from services.gateway.call import Chat
from services.gateway.chat import ChatTemplate
from services.gateway.template_worker import CPU_S, MAX_TEXT_CHARACTERS
from services.gateway.tokenizer import TOY_CHAT, ChatFormat
from shared.errors import InvalidField, StartError
from tests.gateway.house import open_house

CHAT = Chat(({"role": "user", "content": "Hi"},))

ENDLESS = {
    "a loop": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "a power": "{% set n = messages | length + 9 %}{{ 10 ** (n ** 9) }}",
    "a power in the template itself": "{{ 10 ** (10 ** 9) }}",
}
HUGE = {
    "a string": "{{ messages[0].content * (9 ** 12) }}",
    "a string that doubles": "{% set t = namespace(x='aaaaaaaa') %}{% for i in range(60) %}"
    "{% set t.x = t.x ~ t.x %}{% endfor %}{{ t.x }}",
    "a format": "{{ '%99999999999d' % (messages | length) }}",
    "a list": "{{ [messages] * (9 ** 12) }}",
    "an answer": "{% for i in range(99999) %}" + "x" * (MAX_TEXT_CHARACTERS // 90000)
    + "{% endfor %}",
    "a recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
}  # fmt: skip
CURIOUS = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ ''['__class__']['__base__'] }}",
    "{{ (''|attr('__class__')).__mro__ }}",
    "{{ lipsum.__globals__['os'].popen('id').read() }}",
    "{{ self.__init__.__globals__ }}",
    "{{ joiner.__init__.__globals__ }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__code__ }}",
    "{{ '{0.__class__.__mro__}'.format(messages) }}",
    "{{ messages.__class__ }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os }}",
]


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children()}


@pytest.mark.parametrize("name", ENDLESS)
def test_one_that_never_ends_is_ended(name: str) -> None:
    template = ChatTemplate(ChatFormat(ENDLESS[name], {}))
    before = time.process_time()
    with pytest.raises(InvalidField, match=f"took over {CPU_S:g} s") as caught:
        template.render(CHAT)
    assert caught.value.param == "messages"
    assert time.process_time() - before < CPU_S  # not this process's
    template.close()


@pytest.mark.parametrize("name", HUGE)
def test_one_that_takes_all_memory_gets_none_of_ours(name: str) -> None:
    template = ChatTemplate(ChatFormat(HUGE[name], {}))
    before = psutil.Process().memory_info().rss
    with pytest.raises(InvalidField, match="chat template"):
        template.render(CHAT)
    assert psutil.Process().memory_info().rss - before < 2**28
    template.close()


@pytest.mark.parametrize("text", CURIOUS)
def test_one_that_walks_from_name_to_name_gets_nowhere(text: str) -> None:
    template = ChatTemplate(ChatFormat(text, {}))
    with pytest.raises(InvalidField, match="chat template"):
        template.render(CHAT)
    template.close()


def test_its_process_has_no_keys_in_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPLITFLAP_API_KEY", "sk-never-seen")
    before = children()
    template = ChatTemplate(TOY_CHAT)
    template.render(CHAT)
    (worker,) = children() - before
    assert "sk-never-seen" not in repr(psutil.Process(worker).environ())
    template.close()
    assert not children() - before


def test_one_that_was_killed_is_started_again() -> None:
    template = ChatTemplate(TOY_CHAT)
    before = children()
    assert template.render(CHAT) == "user: Hi\nassistant: "
    (worker,) = children() - before
    psutil.Process(worker).kill()
    with pytest.raises(InvalidField, match="was killed"):
        template.render(CHAT)
    assert template.render(CHAT) == "user: Hi\nassistant: "
    template.close()


def test_threads_may_share_one() -> None:
    template = ChatTemplate(TOY_CHAT)
    told = {}

    def ask(number: int) -> None:
        content = str(number) * 1000
        told[number] = template.render(Chat(({"role": "user", "content": content},)))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(10, 30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert told == {n: f"user: {str(n) * 1000}\nassistant: " for n in range(10, 30)}
    template.close()


def test_any_text_comes_back_as_it_is() -> None:
    text = "é \U0001f600 \x00 \ud83d \r\n" + "x" * 2_000_000
    template = ChatTemplate(ChatFormat("{{ messages[0].content }}", {}))
    assert template.render(Chat(({"role": "user", "content": text},))) == text
    template.close()


def test_a_hostile_one_is_found_at_the_start_where_it_shows_there() -> None:
    for text in ("{{ 10 ** (10 ** 9) }}", "{% for %}"):
        with pytest.raises(StartError, match="chat template cannot be read"):
            ChatTemplate(ChatFormat(text, {})).check()


async def test_other_requests_go_on_while_one_hangs(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(
        "services.gateway.tokenizer.ToyTokenizer.chat", ChatFormat(ENDLESS["a loop"], {})
    )
    async with open_house(tmp_path) as house:
        chat = house.post("/v1/chat/completions", messages=list(CHAT.messages))
        async with house.http.get(house.url + "/health/live") as response:
            assert response.status == 200
        status, told = await chat
        assert (status, told["error"]["param"]) == (400, "messages")
        await house.complete()


_LEAVES_ONE_BEHIND = """
import os, sys
from services.gateway.call import Chat
from services.gateway.chat import ChatTemplate
from services.gateway.tokenizer import ChatFormat
template = ChatTemplate(ChatFormat("{{ messages[0].content }}", {}))
template.render(Chat(({"role": "user", "content": "Hi"},)))
print(template._worker._process.pid, flush=True)
if sys.argv[1] == "killed":
    os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("ends", ["killed", "in peace"])
def test_it_ends_with_its_gateway(ends: str) -> None:
    told = subprocess.run(
        [sys.executable, "-c", _LEAVES_ONE_BEHIND, ends],
        capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    worker = json.loads(told.stdout)
    deadline = time.monotonic() + 20
    while psutil.pid_exists(worker) and psutil.Process(worker).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        os.sched_yield()

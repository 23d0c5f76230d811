"""The `splitflap` command: what it says to a slip, and to somebody in a hurry."""

import subprocess
import sys
from pathlib import Path

import pytest

from services.cli import main
from services.supervisor import banner

ROOT = Path(__file__).parents[2]

INTERRUPTED = """
import os, signal, sys
class Hurry:
    def find_spec(self, name, path=None, target=None):
        if name == %r:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Hurry())
sys.argv[1:] = %r
from services.cli import main
sys.exit(main())
"""


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], "splitflap: give a command\n"),
        (["serve"], "no such command: serve; did you mean up?"),
        (["gatewy"], "no such command: gatewy; did you mean gateway?"),
        (["zzzz"], "no such command: zzzz\n"),
    ],
)
def test_what_is_no_command_is_said_and_what_may_be_meant(capsys, given, said):
    assert main(given) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "module"),
    [
        ("version", "shared.version"),
        ("up", "services.supervisor"),
        ("gateway", "shared.settings"),
        ("gateway", "services.gateway.app"),
        ("scheduler", "zmq"),
        ("executor", "torch"),
        ("bench", "services.bench.main"),
    ],
)
def test_an_interrupt_while_modules_are_imported_is_quiet(command, module):
    code = INTERRUPTED % (module, [command])
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")


def test_the_version_needs_none_of_it():
    code = "import sys; from services.cli import main; main(['version']); print(*sys.modules)"
    told = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert not {"pydantic", "structlog", "uvloop", "zmq", "asyncio"} & set(told.stdout.split())


def test_the_banner_shows_where_a_key_goes_and_none():
    told = banner("http://h:1", "toy", 1.0, needs_key=True)
    assert "-H 'Authorization: Bearer YOUR_KEY' \\\n" in told
    assert "Authorization" not in banner("http://h:1", "toy", 1.0, needs_key=False)

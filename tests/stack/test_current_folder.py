"""What lies in the folder where somebody starts the server is not run, whatever its name."""

from collections import Counter

import psutil
import pytest

from tests.stack.client import post
from tests.stack.stack import ROOT, start

pytestmark = pytest.mark.stack

NAMES = ("json.py", "socket.py", "services/__init__.py", "shared/__init__.py")
SCRIPT = f"""
import sys
sys.path.append({str(ROOT)!r})  # nobody says that our modules are installed
from services.cli import main
sys.exit(main())
"""


def modules_run_by(process):
    """{module: how many processes below this one run it}."""
    commands = [child.cmdline() for child in psutil.Process(process.pid).children(recursive=True)]
    return Counter(command[command.index("-m") + 1] for command in commands)


def test_no_process_imports_from_the_current_folder(tmp_path, monkeypatch):
    folder, mark = tmp_path / "model", tmp_path / "was_run"
    for name in NAMES:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"open({str(mark)!r}, 'w').close()\nraise RuntimeError('not to be run')\n")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    # -P, so that the first process is as the installed script: the folder is not on its path
    stack = start(tmp_path, "--model=toy", python=("-P", "-c", SCRIPT), cwd=folder)
    try:
        messages = [{"role": "user", "content": "Hi"}]
        status, _, told = post(stack, "/v1/chat/completions", {"messages": messages})
        assert status == 200, told
        assert modules_run_by(stack.process) == {
            "services.cli": 3,
            "shared.guard_process": 3,
            "services.gateway.template_worker": 1,
        }
    finally:
        assert stack.stop() == 0
    assert not mark.exists()
    assert "child_died" not in stack.log.read_text()

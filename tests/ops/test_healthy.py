"""The health check of our images, against a server that is well, ill, and gone."""

import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "ops/docker/healthy.py"


class Answers(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/well" else 503)
        self.end_headers()
        self.wfile.write(b"loading weights")

    def log_message(self, *_):
        pass


@pytest.fixture
def port():
    with HTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


def check(port, path):
    done = subprocess.run(
        [sys.executable, SCRIPT, str(port), path], capture_output=True, text=True, check=False
    )
    return done.returncode, done.stderr


def test_a_200_is_healthy(port):
    assert check(port, "/well") == (0, "")


def test_all_else_is_not_and_says_why(port):
    assert check(port, "/ill") == (1, "/ill is 503: loading weights\n")


def test_neither_is_what_does_not_answer():
    status, told = check(1, "/well")
    assert status == 1
    assert "port 1 does not answer" in told

"""Exit status 0 if a URL answers within two seconds: `python ops/reachable.py URL`."""

import sys
import urllib.request

TIMEOUT_S = 2


def reachable(url: str) -> bool:
    """Whether the package index at `url` answers."""
    try:
        with urllib.request.urlopen(url.rstrip("/") + "/torch/", timeout=TIMEOUT_S) as answer:
            return answer.status == 200
    except (OSError, ValueError):  # urllib's errors derive from OSError
        return False


if __name__ == "__main__":
    sys.exit(0 if reachable(sys.argv[1]) else 1)

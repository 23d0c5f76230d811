"""`healthy.py PORT PATH`: does this container's service answer 200 there? For HEALTHCHECK."""

import sys
from http.client import HTTPConnection, HTTPException


def main(port: int, path: str) -> str:
    """ "" if it does, or why not."""
    connection = HTTPConnection("127.0.0.1", port, timeout=4)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        told = answer.read(500).decode(errors="replace")
    except (OSError, HTTPException) as error:
        return f"port {port} does not answer: {error}"
    finally:
        connection.close()
    return "" if answer.status == 200 else f"{path} is {answer.status}: {told}"


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2]) or None)

"""Server-sent events out of stamped chunks, whatever the borders of the chunks.

Follows the HTML standard, section 9.2: lines end in LF, CR LF or CR; a line that begins with a
colon is a comment; several data lines of one event are joined. Left out is what these servers do
not use (event names, ids, retry times). One thing is milder than the standard: an event that the
end of the stream cuts off behind its last data line counts, for some servers omit the blank line
behind `[DONE]`.
"""

import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Final

_LINE: Final = re.compile(rb"([^\r\n]*)(\r\n|\n|\r|\Z)")
_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"


def read_events(chunks: Sequence[tuple[float, bytes]]) -> list[tuple[float, bytes]]:
    """(time, data) of each event; the time is that of the chunk with the end of its last data line.

    >>> read_events([(1.0, b": ping\\n\\ndata: a"), (2.0, b"b\\r"), (3.0, b"\\n\\r\\n")])
    [(2.0, b'ab')]
    """
    events: list[tuple[float, bytes]] = []
    data: list[bytes] = []
    stamp = 0.0
    for time, line in _stamped_lines(chunks):
        name, _, value = line.partition(b":")
        if name == b"data":
            data.append(value.removeprefix(b" "))
            stamp = time
        elif not line and data:
            events.append((stamp, b"\n".join(data)))
            data = []
    if data:
        events.append((stamp, b"\n".join(data)))
    return events


def _stamped_lines(chunks: Sequence[tuple[float, bytes]]) -> Iterator[tuple[float, bytes]]:
    whole = b"".join(chunk for _, chunk in chunks)
    ends = list(accumulate(len(chunk) for _, chunk in chunks))
    for match in _LINE.finditer(whole):
        if match.start() == len(whole):
            return
        last = min(match.end(1), len(whole) - 1)  # the first byte that ends the line, or the last
        line = match[1].removeprefix(_BYTE_ORDER_MARK) if match.start() == 0 else match[1]
        yield chunks[bisect_left(ends, last + 1)][0], line

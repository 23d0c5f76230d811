"""Names for the numbers and strings that travel between processes."""

from typing import Annotated, NewType

RequestId = NewType("RequestId", str)
"""One client request; made by the gateway (`cmpl-...`), never taken from a client."""

SequenceId = NewType("SequenceId", int)
"""One growing list of tokens; made by the scheduler, unique within one scheduler life."""

BlockId = NewType("BlockId", int)
"""Index of a physical block in one pool, 0 .. num_blocks - 1."""

Boot = NewType("Boot", int)
"""Random 64-bit number of one process life; compared for equality, never ordered."""

Ids = Annotated[tuple[int, ...], "int32"]
"""Token or block ids; on the wire a byte string of little-endian int32."""

Biases = Annotated[tuple[tuple[int, float], ...], "int32, then float64"]
"""Numbers by token id; on the wire a byte string of int32 ids and one of float64 numbers."""

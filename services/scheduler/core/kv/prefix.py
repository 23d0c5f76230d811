"""The prefix cache: full blocks found again by a chained hash of what is in them.

The hash of a block is SHA-256 over its parent's hash and its token ids, so it stands for all that
comes before it too. The root of a chain is a hash of the tenant (`key_hash`) and the `cache_salt`:
nobody can find out, by how fast an answer comes, what somebody else has asked.
"""

from collections import Counter
from hashlib import sha256
from struct import pack
from typing import Final

from services.scheduler.core.kv.pool import BlockPool
from services.scheduler.core.sequence import Sequence
from shared.ids import BlockId

_FRAME: Final = b"splitflap prefix 1\0"


def root_hash(key_hash: bytes, cache_salt: str) -> bytes:
    """Where the chain of a tenant begins; the lengths make it unambiguous.

    >>> root_hash(b"a", "b") == root_hash(b"ab", "")
    False
    """
    salt = cache_salt.encode("utf-8", "surrogatepass")
    lengths = pack("<QQ", len(key_hash), len(salt))
    return sha256(_FRAME + lengths + key_hash + salt).digest()


def block_hash(parent: bytes, token_ids: tuple[int, ...]) -> bytes:
    """The hash of a full block: of its parent's hash and its tokens, as little-endian int32."""
    return sha256(parent + pack(f"<{len(token_ids)}i", *token_ids)).digest()


class PrefixCache:
    """Which block holds which content, and which content is about to be computed.

    Only blocks whose plan has returned are here. `evictions` counts the blocks that were handed out
    for something else.
    """

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self._pool = pool
        self._block_size = block_size
        self._blocks: dict[bytes, BlockId] = {}
        self._hashes: dict[BlockId, bytes] = {}
        self._expected: Counter[bytes] = Counter()
        self.evictions = 0
        pool.on_evict = self._forget

    @property
    def blocks(self) -> dict[bytes, BlockId]:
        """A copy of what is known: for the laws."""
        return dict(self._blocks)

    @property
    def expected(self) -> Counter[bytes]:
        """A copy of what is expected, and by how many: for the laws."""
        return +self._expected

    def hashes(self, sequence: Sequence, root: bytes, num_blocks: int) -> list[bytes]:
        """The hashes of at least the first `num_blocks` blocks; each is computed once.

        All tokens of these blocks must be known.
        """
        hashes, size = sequence.hashes, self._block_size
        while len(hashes) < num_blocks:
            at = len(hashes) * size
            parent = hashes[-1] if hashes else root
            hashes.append(block_hash(parent, sequence.token_ids(at, at + size)))
        return hashes

    def find(self, hashes: list[bytes]) -> list[BlockId]:
        """The blocks of the longest beginning of this chain that is here."""
        found = []
        for content in hashes:
            block_id = self._blocks.get(content)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def get(self, content: bytes) -> BlockId | None:
        """The block with this content."""
        return self._blocks.get(content)

    def add(self, content: bytes, block_id: BlockId) -> None:
        """This block, which some table holds, has this content, which is not here yet."""
        self._blocks[content] = block_id
        self._hashes[block_id] = content
        self._pool.keep(block_id)

    def is_known(self, block_id: BlockId) -> bool:
        """Whether the content of this block can be found."""
        return block_id in self._hashes

    def is_coming(self, content: bytes) -> bool:
        """Whether somebody who runs will compute this content."""
        return content in self._expected

    def expect(self, content: bytes) -> None:
        """Somebody who runs will compute this."""
        self._expected[content] += 1

    def unexpect(self, content: bytes) -> None:
        """It is there now, or whoever was to compute it has stopped."""
        left = self._expected[content] - 1
        if left:
            self._expected[content] = left
        else:
            del self._expected[content]

    def _forget(self, block_id: BlockId) -> None:
        del self._blocks[self._hashes.pop(block_id)]
        self.evictions += 1

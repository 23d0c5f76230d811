"""A team of threads: one leads, the others follow if they are there in time.

OpenMP's teams wait for every member, even one that another process keeps off its core: then each of
a step's two hundred parallel regions can cost a time slice. Here the leader does whatever nobody
else has taken, and waits only for members that have begun. Followers spin a while for the next
body, then sleep.

STATE is one int64: generation (32 bits), followers that joined (15), open (1), followers at work
(16). A follower joins by swapping in the state it saw with one more joined and at work.
"""

from kernels.cpu.arguments import (
    T_BLOCK,
    T_BODY,
    T_LIMIT,
    T_SLEEPERS,
    T_SPINS,
    T_STATE,
    T_STOP,
)
from kernels.cpu.synchronise import (
    atomic_load,
    call_body,
    exchange,
    fetch_add,
    fetch_and,
    give_way,
    pause,
    sleep_while,
    swap_if,
    wake_all,
)
from kernels.cpu.vector import load_i64

AT_WORK = 0xFFFF
OPEN = 0x10000
ONE_JOINED = 0x20000
JOINED = 0xFFFE0000
SHIFT = 32


def lead(team: int) -> None:
    """Run the body that the block names with up to T_LIMIT followers; returns when all are done."""
    state_at = team + 8 * T_STATE
    generation = (atomic_load(state_at) >> SHIFT) + 1
    exchange(state_at, (generation << SHIFT) | OPEN)
    if atomic_load(team + 8 * T_SLEEPERS) > 0:
        wake_all(state_at + 4)
    call_body(load_i64(team + 8 * T_BODY), load_i64(team + 8 * T_BLOCK))
    fetch_and(state_at, ~OPEN)
    spins = 0
    while atomic_load(state_at) & AT_WORK:
        spins += 1
        if spins < load_i64(team + 8 * T_SPINS):
            pause()
        else:  # a follower was taken off its core: it may want this one
            give_way()


def follow(team: int) -> None:
    """A follower's life: wait for a generation, join it, run its body; until T_STOP."""
    state_at = team + 8 * T_STATE
    limit_at = team + 8 * T_LIMIT
    seen = atomic_load(state_at) >> SHIFT
    spins = 0
    while atomic_load(team + 8 * T_STOP) == 0:
        state = atomic_load(state_at)
        generation = state >> SHIFT
        if generation == seen:
            spins += 1
            if spins < load_i64(team + 8 * T_SPINS):
                pause()
                continue
            fetch_add(team + 8 * T_SLEEPERS, 1)
            if atomic_load(state_at) >> SHIFT == seen and atomic_load(team + 8 * T_STOP) == 0:
                sleep_while(state_at + 4, seen & 0xFFFFFFFF)
            fetch_add(team + 8 * T_SLEEPERS, -1)
            spins = 0
            continue
        spins = 0
        if state & OPEN == 0 or (state & JOINED) // ONE_JOINED >= atomic_load(limit_at):
            seen = generation
        elif swap_if(state_at, state, state + ONE_JOINED + 1) != 0:
            call_body(load_i64(team + 8 * T_BODY), load_i64(team + 8 * T_BLOCK))
            fetch_add(state_at, -1)
            seen = generation

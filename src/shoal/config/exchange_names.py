"""Which ways of summing gradients there are by name. Names only; `shoal.collectives.exchanges` holds what they stand for."""

from __future__ import annotations

from difflib import get_close_matches

from shoal.errors import ConfigError

EXCHANGES = {
    "auto": "the fastest at each size by `shoal bench exchange`; unmeasured: shm on one host, else native",
    "native": "torch's own: gloo, NCCL",
    "shm": "through memory that the workers of one host share",
    "ring": "around a ring: what a worker sends does not grow with their number",
    "hierarchical": "shm inside each host, a ring between the hosts",
    "tree": "up a binary tree and down again: few steps",
    "halving": "recursive halving and doubling: few steps, few bytes",
    "broadcast": "everyone sends everything to everyone",
    "allgather": "everyone gathers all parts and adds them up",
    "chain": "relayed from neighbour to neighbour and back, in chunks",
    "mapreduce": "each worker owns a part of the gradient: shuffle, reduce, all-gather",
}


def check(exchange: str, num_hosts: int) -> None:
    """Refuse a name that means nothing, or nothing here."""
    if exchange not in EXCHANGES:
        guess = get_close_matches(exchange, EXCHANGES, n=1)
        hint = f"Did you mean '{guess[0]}'? " if guess else ""
        raise ConfigError(
            f"there is no exchange '{exchange}'. {hint}Nothing was started; there are {', '.join(EXCHANGES)}."
        )
    if exchange == "shm" and num_hosts > 1:
        raise ConfigError(
            f"the exchange 'shm' sums through memory that all workers share, and they are on {num_hosts} hosts. Nothing was "
            "started; use --exchange native."
        )

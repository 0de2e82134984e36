"""All-reduce schemes over point to point, one file each: `all_reduce(wires, flat)` sums a flat tensor in place.

The order of a sum is a function of (rank, number of ranks, place): every rank
gets the same bits, always. The registry is `shoal.config.choices.EXCHANGES`.
"""

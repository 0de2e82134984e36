"""Seeds as a pure function of their purpose, never of earlier draws."""

from __future__ import annotations

_MASK = (1 << 64) - 1


def mix(*parts: int) -> int:
    """A 63-bit seed from any integers; neighbours give unrelated seeds (splitmix64 per part)."""
    state = 0x9E3779B97F4A7C15
    for part in parts:
        state = (state + (part & _MASK) + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1

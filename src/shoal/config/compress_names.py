"""Which compressors there are by name, and their settings. Names only; `shoal.collectives.compression` holds them."""

from __future__ import annotations

from shoal.config import named_settings
from shoal.config.named_settings import Setting

COMPRESSORS = {
    "none": "gradients travel as they are",
    "bf16": "half the bytes",
    "fp16": "half the bytes, more digits, less range",
    "int8": "a quarter of the bytes",
    "topk:ratio=0.01": "the largest hundredth, the rest is kept for later (error feedback)",
    "powersgd:rank=4": "matrices by thin factors, what they miss is kept for later",
}

_SETTINGS = {
    "none": {},
    "bf16": {},
    "fp16": {},
    "int8": {},
    "topk": {"ratio": Setting(0.01, 1e-6, 1.0)},
    "powersgd": {"rank": Setting(4, 1, 256, is_whole=True)},
}

_REMEMBER = {"topk", "powersgd"}


def parse(said: str) -> tuple[str, dict[str, float]]:
    """Name and settings of `topk:ratio=0.01`; refuses what means nothing."""
    return named_settings.parse(said, _SETTINGS, what="compression", shown=COMPRESSORS)


def remembers(said: str) -> bool:
    """Whether ranks keep something of their own between steps."""
    return parse(said)[0] in _REMEMBER

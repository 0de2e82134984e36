"""Compressors by name."""

from __future__ import annotations

from collections.abc import Callable

import torch

from shoal.collectives.compression.casts import Cast
from shoal.collectives.compression.compressor import Compressor
from shoal.collectives.compression.int8 import Int8
from shoal.collectives.compression.powersgd import PowerSgd
from shoal.collectives.compression.topk import TopK
from shoal.config import compress_names

_BUILDERS: dict[str, Callable[..., Compressor]] = {
    "bf16": lambda: Cast(torch.bfloat16),
    "fp16": lambda: Cast(torch.float16),
    "int8": Int8,
    "topk": lambda ratio: TopK(ratio),
    "powersgd": lambda rank: PowerSgd(int(rank)),
}


def compressor(said: str) -> Compressor | None:
    """What `--compress` means; None for "none"."""
    name, settings = compress_names.parse(said)
    return None if name == "none" else _BUILDERS[name](**settings)

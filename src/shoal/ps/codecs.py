"""Codecs of pushes and pulls: numbers as they travel between a worker and a server.

Without state, so a push that is sent again has the same bytes, and a killed
worker leaves nothing behind. The arithmetic is that of
`collectives/compression`; what is summed and updated is in full precision.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from numpy.typing import NDArray

from shoal.collectives.compression import Traffic, int8
from shoal.config.choices import COMPRESSORS
from shoal.errors import ConfigError

Array = NDArray[Any]


class Codec(Protocol):
    """Rows of numbers to bytes and back: [num_rows, width], contiguous, float32 or float64."""

    def num_bytes(self, num_rows: int, width: int) -> int:
        """Bytes of so many rows."""

    def encode(self, values: Array) -> Array:
        """Those bytes: uint8."""

    def decode(self, data: Any, out: Array) -> None:
        """Numbers of `data`, which has as many bytes as `out` needs."""


class Cast:
    """Numbers of 16 bits."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def num_bytes(self, num_rows: int, width: int) -> int:
        return 2 * num_rows * width

    def encode(self, values: Array) -> Array:
        found: Array = torch.from_numpy(values).reshape(-1).to(self._dtype).view(torch.uint8).numpy()
        return found

    def decode(self, data: Any, out: Array) -> None:
        if out.size:
            small = torch.frombuffer(data, dtype=self._dtype, count=out.size)
            torch.from_numpy(out).copy_(small.view(out.shape))


class Int8:
    """Whole numbers of 8 bits and a scale for each row, or for each block of a longer one."""

    def num_bytes(self, num_rows: int, width: int) -> int:
        size = num_rows * width
        return size + 4 * -(-size // _block(width))

    def encode(self, values: Array) -> Array:
        flat = torch.from_numpy(values).reshape(-1)
        found: Array = int8.pack(flat, _block(values.shape[1])).numpy()
        return found

    def decode(self, data: Any, out: Array) -> None:
        if out.size:
            packed = torch.frombuffer(data, dtype=torch.uint8)
            flat = torch.from_numpy(out).reshape(-1)
            flat.copy_(int8.unpack(packed, flat, _block(out.shape[1])))


def _block(width: int) -> int:
    return min(width, int8.BLOCK)


CODECS: dict[str, Codec] = {"bf16": Cast(torch.bfloat16), "fp16": Cast(torch.float16), "int8": Int8()}


def codec(name: str) -> Codec | None:
    """None for ""; ConfigError where there is no such codec."""
    if name and name not in CODECS:
        raise ConfigError(f"there is no codec '{name}'; there are {', '.join(CODECS)}")
    return CODECS.get(name)


class Compression:
    """Codecs of one worker's pushes and pulls under `--compress`, and the bytes that they saved."""

    def __init__(self, compress: str = "none") -> None:
        choice, _ = COMPRESSORS.parse(compress)
        self.push, self.pull = choice.push, choice.pull
        self.traffic = Traffic()

    def encoded(self, values: Array) -> Array:
        """Gradients as they are pushed: [num_rows, width]."""
        used = codec(self.push)
        encoded = used.encode(values) if used is not None else values
        self.count(values.nbytes, encoded.nbytes)
        return encoded

    def pulled_bytes(self, num_rows: int, width: int, itemsize: int, name: str) -> int:
        """Bytes of rows as they are pulled under this codec. Pulls without one are no part of training."""
        used, raw_bytes = codec(name), num_rows * width * itemsize
        if used is None:
            return raw_bytes
        num_bytes = used.num_bytes(num_rows, width)
        self.count(raw_bytes, num_bytes)
        return num_bytes

    def count_keys(self, keys: Array, name: str) -> None:
        """Keys travel as they are."""
        if name:
            self.count(keys.nbytes, keys.nbytes)

    def count(self, raw_bytes: int, sent_bytes: int) -> None:
        self.traffic.raw_bytes += raw_bytes
        self.traffic.sent_bytes += sent_bytes

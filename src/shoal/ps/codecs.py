"""Codecs of pushes and pulls: encoding of numbers between a worker and a server.

Stateless, so a repeated push has the same bytes, and a killed worker leaves nothing behind; except
top-k, whose residual a worker keeps in `Compression` for its next push. The arithmetic is that of
`collectives/compression`; sums and updates are in full precision.
"""

from __future__ import annotations

import functools
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from shoal.collectives.compression import Traffic, int8
from shoal.config.choices import COMPRESSORS
from shoal.errors import ConfigError

Array = NDArray[Any]


class Codec(Protocol):
    """Rows of numbers to bytes and back: [num_rows, width], contiguous, float32 or float64."""

    has_fixed_size: ClassVar[bool]
    """Whether `num_bytes` are the bytes, and not the most of them."""

    def num_bytes(self, num_rows: int, width: int) -> int:
        """Bytes of so many rows; the most of them, where that depends on the numbers."""

    def encode(self, values: Array) -> Array:
        """The rows as uint8, `num_bytes` long or shorter."""

    def decode(self, data: Any, out: Array) -> None:
        """Numbers of `data`, which has as many bytes as `out` needs."""


class PartialCodec(Codec, Protocol):
    """The codec of a compressor that keeps a part of each push for the next one."""

    def select(self, values: Array) -> Array:
        """The elements of a flat gradient that are pushed now; zero elsewhere."""


class Cast:
    """Numbers of 16 bits."""

    has_fixed_size = True

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


bf16 = functools.partial(Cast, torch.bfloat16)
fp16 = functools.partial(Cast, torch.float16)


class Int8:
    """Whole numbers of 8 bits and a scale for each row, or for each block of a longer one."""

    has_fixed_size = True

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
            int8.unpack(packed, flat, _block(out.shape[1]))


class TopK:
    """The largest elements as (place, value); the others are zero."""

    has_fixed_size = False

    def __init__(self, ratio: float = 0.01) -> None:
        self._ratio = ratio

    def select(self, values: Array) -> Array:
        count = max(1, round(self._ratio * values.size))
        places = torch.from_numpy(values).abs().topk(count, sorted=False).indices.numpy()
        sent = np.zeros_like(values)
        sent[places] = values[places]
        return sent

    def num_bytes(self, num_rows: int, width: int) -> int:
        return num_rows * width * 12

    def encode(self, values: Array) -> Array:
        flat = values.reshape(-1)
        places = np.flatnonzero(flat).astype(np.uint32)
        return np.concatenate([flat[places].view(np.uint8), places.view(np.uint8)])

    def decode(self, data: Any, out: Array) -> None:
        num_sent, rest = divmod(len(data), out.itemsize + 4)
        places = np.frombuffer(
            data, np.uint32, offset=num_sent * out.itemsize, count=num_sent if not rest else 0
        )
        if rest or (num_sent and int(places.max()) >= out.size):
            raise ConfigError(f"{len(data)} bytes are no places and values among {out.size} numbers")
        out[...] = 0.0
        out.reshape(-1)[places] = np.frombuffer(data, out.dtype, count=num_sent)


def _block(width: int) -> int:
    return min(width, int8.BLOCK)


CODECS = tuple(name for name, choice in COMPRESSORS.items() if choice.codec is not None)
"""Names on the wire."""


@functools.cache
def codec(name: str) -> Codec | None:
    """None for ""; ConfigError where there is no such codec."""
    if not name:
        return None
    choice = COMPRESSORS.get(name)
    if choice is None or choice.codec is None:
        raise ConfigError(f"there is no codec '{name}'; there are {', '.join(CODECS)}")
    made: Codec = choice.codec.load()()
    return made


class Compression:
    """Codecs of one worker's pushes and pulls under `--compress`, and the bytes that they saved."""

    def __init__(self, compress: str = "none") -> None:
        choice, settings = COMPRESSORS.parse(compress)
        self.push, self.pull = choice.push, choice.codec.pull if choice.codec is not None else ""
        self.traffic = Traffic()
        # Of dense chunks alone: rows are few already and travel as they are.
        self._name = choice.name
        self._partial: PartialCodec | None = (
            choice.codec.load()(**settings) if choice.codec is not None and choice.pushes_parts else None
        )
        self._residuals: dict[int, Array] = {}  # by chunk: what was not pushed yet
        self._before: dict[int, Array | float] = {}  # the same before the last push

    @property
    def is_on(self) -> bool:
        return bool(self.push) or self._partial is not None

    @property
    def has_residual(self) -> bool:
        """Whether a part of each push is kept for the next one."""
        return self._partial is not None

    def dense_codec(self) -> str:
        return self._name if self._partial is not None else self.push

    def encoded_chunk(self, chunk: int, values: Array) -> Array:
        """A chunk's gradient as it is pushed: [1, width]."""
        if self._partial is None:
            return self.encoded(values)
        self._before[chunk] = self._residuals.get(chunk, 0.0)
        whole = values.reshape(-1) + self._before[chunk]
        sent = self._partial.select(whole)
        whole[sent != 0] = 0.0
        self._residuals[chunk] = whole
        encoded = self._partial.encode(sent)
        self.count(values.nbytes, encoded.nbytes)
        return encoded

    def heard(self, *, counts: bool) -> None:
        """If the last push did not count, because another worker's with the same batches did, drop its residual."""
        before, self._before = self._before, {}
        if counts:
            return
        self._residuals |= {chunk: rest for chunk, rest in before.items() if not isinstance(rest, float)}
        for chunk in (chunk for chunk, rest in before.items() if isinstance(rest, float)):
            self._residuals.pop(chunk, None)

    def take_residuals(self) -> dict[int, Array]:
        """Take the residuals of partial pushes; the caller owns them from now on."""
        residuals, self._residuals = self._residuals, {}
        return residuals

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

    def count(self, raw_bytes: int, sent_bytes: int) -> None:
        self.traffic.raw_bytes += raw_bytes
        self.traffic.sent_bytes += sent_bytes

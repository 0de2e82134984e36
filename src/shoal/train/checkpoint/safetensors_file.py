"""One safetensors file, written and read as a stream.

The format is a length, a JSON header and the tensors' bytes: a file is hashed
while it is written, and needs no second copy of the model. The library of that
name writes to local paths alone, and reports a full disk as something other
than an OSError. Each reads what the other writes.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shoal.errors import ConfigError

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
_BLOCK_BYTES = 4 << 20
_MAX_HEADER_BYTES = 100_000_000  # as in the format's own library


@dataclass(frozen=True, slots=True)
class Entry:
    """Location of one tensor in a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    """First byte, counted from the start of the file."""

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def dtype_code(dtype: torch.dtype, name: str) -> str:
    """The format's name of a dtype; `name` identifies the tensor in the refusal."""
    code = _CODES.get(dtype)
    if code is None:
        raise ConfigError(
            f"{name} is {dtype}, which a safetensors file cannot hold. Nothing was saved; keep it as one of "
            f"{', '.join(str(known).removeprefix('torch.') for known in _CODES)}."
        )
    return code


def dtype_of(code: str) -> torch.dtype:
    try:
        return _DTYPES[code]
    except KeyError:
        raise ValueError(f"dtype '{code}' is unknown") from None


def write(
    sink: Any, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> tuple[int, str]:
    """Write one file, and return its size and sha256. Tensors may be on any device, with any strides."""
    # Widest elements first, so that every tensor begins at a multiple of its element size, which mapping
    # readers want.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    position = 0
    for name, tensor in ordered:
        end = position + tensor.numel() * tensor.dtype.itemsize
        header[name] = {
            "dtype": dtype_code(tensor.dtype, name),
            "shape": list(tensor.shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    opening = len(text).to_bytes(8, "little") + text

    digest = hashlib.sha256(opening)
    sink.write(opening)
    for _, tensor in ordered:
        if tensor.numel():
            # A memoryview of the tensor itself where it is contiguous and on the CPU: nothing is copied.
            data = _bytes(tensor.detach().cpu().contiguous()).numpy().data
            for begin in range(0, len(data), _BLOCK_BYTES):
                block = data[begin : begin + _BLOCK_BYTES]
                digest.update(block)
                sink.write(block)
    return len(opening) + position, digest.hexdigest()


def read_header(source: Any, num_bytes: int) -> dict[str, Entry]:
    """Location of each tensor of a file of `num_bytes`. Refuses entries that point outside of it before anything is allocated."""
    source.seek(0)
    header_bytes = int.from_bytes(source.read(8), "little")
    if not 2 <= header_bytes <= min(num_bytes - 8, _MAX_HEADER_BYTES):
        raise ValueError(f"its header claims {header_bytes} bytes of a file of {num_bytes}")
    try:
        header = json.loads(source.read(header_bytes))
        header.pop("__metadata__", None)
        return {name: _entry(name, record, 8 + header_bytes, num_bytes) for name, record in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"its header cannot be understood ({error})") from None


def read_metadata(source: Any) -> dict[str, str]:
    source.seek(0)
    header = json.loads(source.read(int.from_bytes(source.read(8), "little")))
    return dict(header.get("__metadata__", {}))


def read_tensor(
    source: Any, entry: Entry, offset: Sequence[int] | None = None, shape: Sequence[int] | None = None
) -> Tensor:
    """One tensor, or the part of it at `offset`, in fresh memory. For a part, only its rows are read."""
    shape = entry.shape if shape is None else tuple(shape)
    offset = (0,) * len(shape) if offset is None else offset
    tensor = torch.empty(shape, dtype=entry.dtype)
    if not tensor.numel():
        return tensor
    row_bytes = entry.dtype.itemsize * math.prod(entry.shape[1:])
    begin = entry.begin + (offset[0] * row_bytes if offset else 0)
    if shape[1:] == entry.shape[1:]:
        _fill(tensor, source, begin)
        return tensor
    # A few rows at a time, of which the part is kept.
    num_rows = max(_BLOCK_BYTES // row_bytes, 1)
    for first in range(0, shape[0], num_rows):
        rows = torch.empty((min(num_rows, shape[0] - first), *entry.shape[1:]), dtype=entry.dtype)
        _fill(rows, source, begin + first * row_bytes)
        for dim, (at, size) in enumerate(zip(offset[1:], shape[1:], strict=True), start=1):
            rows = rows.narrow(dim, at, size)
        tensor[first : first + len(rows)] = rows
    return tensor


def _fill(tensor: Tensor, source: Any, begin: int) -> None:
    source.seek(begin)
    left = _bytes(tensor).numpy().data
    while left:
        count = source.readinto(left)
        if not count:
            raise ValueError(f"it ends {len(left)} bytes before a tensor does")
        left = left[count:]


def _bytes(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.resolve_neg().reshape(-1).view(torch.uint8)


def _entry(name: str, record: dict[str, Any], data_begin: int, num_bytes: int) -> Entry:
    begin, end = record["data_offsets"]
    shape = tuple(record["shape"])
    if not all(isinstance(size, int) and size >= 0 for size in (begin, end, *shape)):
        raise ValueError(f"'{name}' has sizes that are none")
    entry = Entry(dtype_of(record["dtype"]), shape, data_begin + begin)
    if end - begin != entry.num_bytes or entry.begin + entry.num_bytes > num_bytes:
        raise ValueError(f"'{name}' claims bytes {begin} to {end}, which does not fit its shape or the file")
    return entry

from __future__ import annotations

import hashlib
import io
import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.errors import ConfigError
from shoal.train.checkpoint import safetensors_file

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8, torch.bool,
]  # fmt: skip
shapes = st.lists(st.integers(0, 4), max_size=3)


def some(dtype: torch.dtype, shape: list[int], seed: int = 0) -> torch.Tensor:
    """Random bits of that type; not numbers for all, which is the point."""
    raw = torch.randint(0, 256, (max(1, torch.Size(shape).numel()), dtype.itemsize), dtype=torch.uint8)
    raw = raw % 2 if dtype == torch.bool else raw
    return raw.view(dtype).reshape(-1)[: torch.Size(shape).numel()].reshape(shape)


def bits(tensor: torch.Tensor) -> tuple[Any, ...]:
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return (
        tensor.dtype,
        tuple(tensor.shape),
        tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(),
    )


def written(tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> bytes:
    buffer = io.BytesIO()
    safetensors_file.write(buffer, tensors, metadata)
    return buffer.getvalue()


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(st.text(min_size=1, max_size=8), st.tuples(st.sampled_from(DTYPES), shapes), max_size=6)
)
def test_every_dtype_and_shape_comes_back_to_the_bit(
    wanted: dict[str, tuple[torch.dtype, list[int]]],
) -> None:
    tensors = {name: some(dtype, shape) for name, (dtype, shape) in wanted.items()}
    raw = written(tensors)
    source = io.BytesIO(raw)
    entries = safetensors_file.read_header(source, len(raw))
    assert entries.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert bits(safetensors_file.read_tensor(source, entries[name])) == bits(tensor)


def test_the_formats_own_library_reads_it(tmp_path: Path) -> None:
    tensors = {str(dtype): some(dtype, [3, 5]) for dtype in DTYPES} | {
        "number": torch.tensor(1.5),
        "none": torch.zeros(0, 3),
    }
    path = tmp_path / "file.safetensors"
    path.write_bytes(written(tensors, {"format": "pt"}))
    read = safetensors.torch.load_file(path)
    assert {name: bits(tensor) for name, tensor in read.items()} == {
        name: bits(t) for name, t in tensors.items()
    }


def test_what_the_formats_own_library_writes_is_read() -> None:
    tensors = {str(dtype): some(dtype, [3, 5]) for dtype in DTYPES}
    raw = safetensors.torch.save(tensors, {"by": "the library"})
    entries = safetensors_file.read_header(io.BytesIO(raw), len(raw))
    for name, tensor in tensors.items():
        assert bits(safetensors_file.read_tensor(io.BytesIO(raw), entries[name])) == bits(tensor)
    assert safetensors_file.read_metadata(io.BytesIO(raw)) == {"by": "the library"}


def test_strides_do_not_matter() -> None:
    tensor = torch.arange(12.0).reshape(3, 4)
    views = {
        "transposed": tensor.t(),
        "column": tensor[:, 1],
        "expanded": torch.ones(1).expand(4),
        "conjugate": torch.tensor([1 + 2j]).conj(),
    }
    raw = written(views)
    entries = safetensors_file.read_header(io.BytesIO(raw), len(raw))
    for name, view in views.items():
        assert torch.equal(safetensors_file.read_tensor(io.BytesIO(raw), entries[name]), view)


def test_the_hash_is_that_of_the_file() -> None:
    buffer = io.BytesIO()
    num_bytes, sha256 = safetensors_file.write(buffer, {"a": torch.rand(3_000_000)})  # several blocks
    assert num_bytes == len(buffer.getvalue())
    assert sha256 == hashlib.sha256(buffer.getvalue()).hexdigest()


def test_a_dtype_the_format_has_no_word_for_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"phase is torch\.complex128"):
        written({"phase": torch.zeros(2, dtype=torch.complex128)})


def with_header(header: Any, data: bytes = b"\0" * 16) -> tuple[io.BytesIO, int]:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    raw = len(text).to_bytes(8, "little") + text + data
    return io.BytesIO(raw), len(raw)


@pytest.mark.parametrize(
    "header",
    [
        b"not json",
        [1, 2],
        {"a": 3},
        {"a": {"dtype": "F32", "shape": [4]}},
        {"a": {"dtype": "F99", "shape": [4], "data_offsets": [0, 16]}},
        {"a": {"dtype": "F32", "shape": [5], "data_offsets": [0, 16]}},
        {"a": {"dtype": "F32", "shape": [1 << 60], "data_offsets": [0, 1 << 62]}},
        {"a": {"dtype": "F32", "shape": [4], "data_offsets": [8, 24]}},
        {"a": {"dtype": "F32", "shape": [-4, -1], "data_offsets": [0, 16]}},
        {"a": {"dtype": "F32", "shape": [4], "data_offsets": [-8, 8]}},
    ],
)
def test_a_header_that_lies_is_refused_before_anything_is_allocated(header: Any) -> None:
    with pytest.raises(ValueError, match="its header cannot be understood"):
        safetensors_file.read_header(*with_header(header))


def test_a_header_longer_than_the_file_is_refused() -> None:
    with pytest.raises(ValueError, match="claims 72340172838076673 bytes of a file of 20"):
        safetensors_file.read_header(io.BytesIO(b"\1" * 20), 20)


@pytest.mark.parametrize("shape", [(7,), (5, 6), (4, 3, 5)])
def test_part_of_a_tensor_is_read_alone(shape: tuple[int, ...], tmp_path: Path) -> None:
    whole = torch.arange(math.prod(shape), dtype=torch.float64).reshape(shape)
    path = tmp_path / "x.safetensors"
    with path.open("wb") as sink:
        num_bytes, _ = safetensors_file.write(sink, {"before": torch.ones(3), "w": whole})
    with path.open("rb") as source:
        entry = safetensors_file.read_header(source, num_bytes)["w"]
        for offset in itertools.product(*(range(size) for size in shape)):
            part = [size - at - (at == 0) for size, at in zip(shape, offset, strict=True)]
            wanted = whole[tuple(slice(at, at + size) for at, size in zip(offset, part, strict=True))]
            assert torch.equal(safetensors_file.read_tensor(source, entry, offset, part), wanted)

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.errors import CheckpointDamaged, CheckpointError
from shoal.train.checkpoint.checkpoint import (
    FORMAT,
    FileRecord,
    Manifest,
    PieceRecord,
    decode_manifest,
    encode_manifest,
)

EXAMPLE = Manifest(
    format=FORMAT,
    shoal="0.1.0",
    torch="2.13.0",
    progress={"step": 500, "best": {"$float": "inf"}, "data": {"seed": 0}},
    files={"model.safetensors": FileRecord(1234, "ab" * 32)},
    pieces=[
        PieceRecord(
            "model/fc.weight", "model.safetensors", f"fc.weight@{row},0", "F32", [2, 3], [4, 3], [row, 0]
        )
        for row in (2, 0)
    ],
)
TEXT = encode_manifest(EXAMPLE)


def test_it_comes_back_as_it_went_in() -> None:
    assert decode_manifest(TEXT, "here") == EXAMPLE


def test_any_json_reader_can_read_it() -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    assert json.loads(TEXT, parse_constant=refuse)["pieces"][0]["offset"] == [2, 0]


@settings(deadline=None)
@given(st.integers(0, len(TEXT) * 8 - 1))
def test_every_flipped_bit_is_noticed(bit: int) -> None:
    damaged = bytearray(TEXT)
    damaged[bit // 8] ^= 1 << bit % 8
    with pytest.raises(CheckpointDamaged, match=r"manifest\.json"):
        decode_manifest(bytes(damaged), "here")


@settings(deadline=None)
@given(st.integers(0, len(TEXT) - 1))
def test_every_torn_end_is_noticed(length: int) -> None:
    with pytest.raises(CheckpointDamaged, match=f"is torn: after {length} bytes"):
        decode_manifest(TEXT[:length], "here")


def test_a_newer_format_says_who_wrote_it() -> None:
    newer = encode_manifest(Manifest(3, "0.9.0", "3.0", {}, {}, []))
    with pytest.raises(
        CheckpointError, match=r"format 3 \(written by shoal 0\.9\.0\), and this version reads format 2"
    ):
        decode_manifest(newer, "here")


@pytest.mark.parametrize("name", ["../secret.safetensors", "a/b.safetensors", "/etc/passwd", ".safetensors"])
def test_a_manifest_cannot_point_out_of_its_directory(name: str) -> None:
    text = encode_manifest(Manifest(1, "0.1.0", "2.13.0", {}, {name: FileRecord(0, "")}, []))
    with pytest.raises(CheckpointDamaged, match="that is none of its own"):
        decode_manifest(text, "here")

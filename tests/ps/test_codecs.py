"""Codecs of pushes and pulls: sizes as announced, errors within their bounds, damaged frames refused."""

from __future__ import annotations

import numpy as np
import pytest

from shoal.config.choices import COMPRESSORS
from shoal.errors import ConfigError
from shoal.ps.codecs import CODECS, Codec, Compression, codec
from shoal.ps.server.contents import Contents, Refusal
from shoal.runtime.transport.messages.client_server import TableSpec

BOUNDS = {"bf16": 2.0**-8, "fp16": 2.0**-11, "int8": 0.5 / 127}
"""Of the error, as a part of the largest number in a row."""


def found_codec(name: str) -> Codec:
    found = codec(name)
    assert found is not None
    return found


SHARES = ["bf16", "fp16", "int8", "topk:ratio=0.1"]


@pytest.mark.parametrize("form", SHARES)
def test_a_push_has_the_share_of_bytes_that_the_planner_counts(form: str) -> None:
    choice, settings = COMPRESSORS.parse(form)
    assert choice.codec is not None
    gradient = np.random.default_rng(0).standard_normal((1, 10_000)).astype(np.float32)
    pushed = Compression(form).encoded_chunk(0, gradient)
    assert pushed.nbytes / gradient.nbytes == pytest.approx(choice.codec.share(settings), rel=0.01)


def test_every_codec_of_a_compressor_is_compared_with_its_share_and_pulled_in_one_that_exists() -> None:
    assert {form.partition(":")[0] for form in SHARES} == set(CODECS)
    for choice in COMPRESSORS.values():
        if choice.codec is not None:
            assert bool(choice.push) != choice.pushes_parts
            codec(choice.codec.pull)


@pytest.mark.parametrize("name", BOUNDS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shape", [(7, 5), (1, 3000), (0, 4)])
def test_a_codec_is_as_long_and_as_near_as_it_says(name: str, dtype: str, shape: tuple[int, int]) -> None:
    values = np.random.default_rng(0).standard_normal(shape).astype(dtype)
    values[:1] *= 1e-3  # a row of small numbers stays one
    encoded, out = found_codec(name).encode(values), np.full(shape, np.nan, dtype)
    assert encoded.nbytes == found_codec(name).num_bytes(*shape)
    found_codec(name).decode(bytearray(encoded), out)
    largest = np.abs(values).max(axis=1, keepdims=True, initial=0)
    assert (np.abs(out - values) <= 1.01 * BOUNDS[name] * largest).all()


@pytest.mark.parametrize("name", CODECS)
def test_what_is_not_finite_stays_so(name: str) -> None:
    values = np.array([[1.0, np.nan], [np.inf, 2.0]], np.float32)
    out = np.zeros_like(values)
    found_codec(name).decode(bytearray(found_codec(name).encode(values)), out)
    assert not np.isfinite(out).all(axis=1).any()


def test_frames_of_another_length_and_unknown_codecs_are_refused() -> None:
    contents = Contents()
    contents.declare_table(TableSpec(number=0, name="t", dim=4, dtype="float32", rule="sgd", settings={}))
    with pytest.raises(Refusal, match="3 rows of 4 numbers are 24 bytes in bf16, got 23"):
        contents.values(contents.table(0), bytes(23), 3, "bf16")
    with pytest.raises(Refusal, match="no codec 'zip'"):
        contents.values(contents.table(0), bytes(24), 3, "zip")
    with pytest.raises(ConfigError, match="there are bf16, fp16, int8"):
        codec("zip")


def test_bytes_are_counted_as_sent_and_as_they_would_have_been() -> None:
    compression = Compression("int8")
    compression.encoded(np.ones((10, 16), np.float32))
    assert compression.pulled_bytes(10, 16, 4, compression.pull) == 320
    assert (compression.traffic.raw_bytes, compression.traffic.sent_bytes) == (2 * 640, 200 + 320)


def test_topk_pushes_the_largest_and_loses_nothing() -> None:
    compression, draw = Compression("topk:ratio=0.1"), np.random.default_rng(0)
    pushed, given = np.zeros(200), np.zeros(200)
    for _ in range(20):
        gradient = draw.normal(size=(1, 200))
        out = np.full((1, 200), np.nan)
        encoded = compression.encoded_chunk(3, gradient)
        found_codec("topk").decode(bytearray(encoded), out)
        assert np.count_nonzero(out) == 20
        pushed += out[0]
        given += gradient[0]
    np.testing.assert_allclose(pushed + compression.take_residuals()[3], given)
    assert compression.take_residuals() == {}
    assert compression.traffic.sent_bytes < 0.16 * compression.traffic.raw_bytes


@pytest.mark.parametrize("places", [[7], [2**32 - 1]])
def test_topk_refuses_places_outside_of_the_chunk(places: list[int]) -> None:
    data = np.concatenate([np.ones(1, np.float32).view(np.uint8), np.array(places, np.uint32).view(np.uint8)])
    with pytest.raises(ConfigError, match="no places and values"):
        found_codec("topk").decode(bytearray(data), np.empty((1, 7), np.float32))


def test_topk_keeps_nothing_of_a_push_that_another_worker_had_made() -> None:
    compression = Compression("topk:ratio=0.25")
    compression.encoded_chunk(0, np.array([[1.0, 2.0, 3.0, 4.0]]))
    compression.encoded_chunk(0, np.array([[9.0, 9.0, 9.0, 9.0]]))
    compression.heard(counts=False)
    assert compression.take_residuals()[0].tolist() == [1.0, 2.0, 3.0, 0.0]


def test_topk_takes_nothing_back_of_a_push_that_counts() -> None:
    compression = Compression("topk:ratio=0.25")
    compression.encoded_chunk(0, np.array([[1.0, 2.0, 3.0, 4.0]]))
    compression.heard(counts=True)
    compression.heard(counts=False)  # of batches without a gradient, which another worker had pushed
    assert compression.take_residuals()[0].tolist() == [1.0, 2.0, 3.0, 0.0]

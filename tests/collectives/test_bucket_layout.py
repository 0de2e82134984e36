"""Bucket layout of gradients: a function of the model alone."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shoal.collectives.gradients import Item, lay_out

ITEMS = st.lists(
    st.tuples(st.integers(0, 500), st.sampled_from(["float32/cpu", "float64/cpu"])), min_size=0, max_size=40
).map(lambda made: [Item(i, numel, 8 if "64" in kind else 4, kind) for i, (numel, kind) in enumerate(made)])


@given(ITEMS, st.integers(64, 4096))
def test_every_gradient_has_exactly_one_place(items: list[Item], bucket_bytes: int) -> None:
    buckets = lay_out(items, bucket_bytes=bucket_bytes, first_bucket_bytes=64)
    placed = [index for bucket in buckets for index in bucket.indices]
    assert sorted(placed) == [item.index for item in items]


@given(ITEMS, st.integers(64, 4096))
def test_places_do_not_overlap_and_leave_room_for_the_flags(items: list[Item], bucket_bytes: int) -> None:
    for bucket in lay_out(items, bucket_bytes=bucket_bytes, first_bucket_bytes=64):
        at = 0
        for index, offset in zip(bucket.indices, bucket.offsets, strict=True):
            assert offset == at
            assert items[index].kind == bucket.kind
            at += items[index].numel
        assert bucket.numel == at
        assert bucket.length == at + len(bucket.indices)


@given(ITEMS, st.integers(64, 4096))
def test_a_bucket_passes_its_limit_only_for_a_single_gradient(items: list[Item], bucket_bytes: int) -> None:
    for bucket in lay_out(items, bucket_bytes=bucket_bytes, first_bucket_bytes=64):
        size = sum(items[index].numel * items[index].itemsize for index in bucket.indices)
        assert size <= bucket_bytes or len(bucket.indices) == 1


@given(ITEMS)
def test_the_layout_is_the_same_every_time(items: list[Item]) -> None:
    assert lay_out(items) == lay_out(items)


def test_the_last_parameters_leave_first() -> None:
    items = [Item(index, 100, 4, "float32/cpu") for index in range(6)]
    buckets = lay_out(items, bucket_bytes=800, first_bucket_bytes=400)
    assert [bucket.indices for bucket in buckets] == [(5,), (4, 3), (2, 1), (0,)]

"""Compiled kernels of `shm`: write chunks into a ring that peers can read, and sum or copy every rank's chunks.

`shm.py` decides how long to wait and lays the memory out: counters, a cache line for each, then a
ring of chunks for every rank. Here memory is addresses. Counters only grow, and each is written by
one rank; loads acquire and stores release, so data written before a counter can be read after it.

Everything else is in this one file, because numba checks only a kernel's own file for changes.
Imported once compiled or requested; until then shm_torch.py sums.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Any

import numba
from llvmlite import binding, ir  # type: ignore[import-untyped]  # it has no types
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from shoal.collectives.shm_layout import (
    BFLOAT16,
    DONE,
    FLOAT16,
    FLOAT32,
    FLOAT64,
    INT8,
    INT16,
    INT32,
    INT64,
    LINE,
    NONE,
    RING,
    SOME,
    WORK,
)  # fmt: skip
from shoal.runtime.kernel_cache import INT, inlined, kernel, vector

_BLOCK = 16 << 10  # bytes that stay in the nearest cache while the parts of many ranks are added to them

# numba describes itself to type checkers in part; what it makes of a function is not what it says.
_make: Any = intrinsic
_memcpy: Any = cgutils.raw_memcpy

Builder = Any  # of llvmlite, which has no types
Value = Any


# ---- memory -----------------------------------------------------------------------------------------


def _at(builder: Builder, address: Value, element: Any) -> Value:
    return builder.inttoptr(address, element.as_pointer())


@_make  # type: ignore[untyped-decorator, unused-ignore]
def _load(typing_context: Any, address: Any) -> Any:
    """A counter."""

    def generate(context: Any, builder: Builder, signature: Any, args: Any) -> Value:
        return builder.load_atomic(_at(builder, args[0], ir.IntType(64)), "acquire", 8)

    return types.int64(types.int64), generate


@_make  # type: ignore[untyped-decorator, unused-ignore]
def _store(typing_context: Any, address: Any, value: Any) -> Any:
    """A counter, after all that was written before."""

    def generate(context: Any, builder: Builder, signature: Any, args: Any) -> Value:
        builder.store_atomic(args[1], _at(builder, args[0], ir.IntType(64)), "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@_make  # type: ignore[untyped-decorator, unused-ignore]
def _copy(typing_context: Any, to: Any, source: Any, num_bytes: Any) -> Any:
    def generate(context: Any, builder: Builder, signature: Any, args: Any) -> Value:
        byte = ir.IntType(8)
        _memcpy(builder, _at(builder, args[0], byte), _at(builder, args[1], byte), args[2], 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@_make  # type: ignore[untyped-decorator, unused-ignore]
def _stream_line(typing_context: Any, to: Any, source: Any) -> Any:
    """A line to an address that is a multiple of LINE, past the caches."""

    def generate(context: Any, builder: Builder, signature: Any, args: Any) -> Value:
        line = ir.VectorType(ir.IntType(32), LINE // 4)
        value = builder.load(_at(builder, args[1], line), align=1)
        stored = builder.store(value, _at(builder, args[0], line), align=LINE)
        stored.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@_make  # type: ignore[untyped-decorator, unused-ignore]
def _fence(typing_context: Any) -> Any:
    """Order streamed stores before later ones."""

    def generate(context: Any, builder: Builder, signature: Any, args: Any) -> Value:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


@inlined
def _stream(to: int, source: int, num_bytes: int) -> None:
    whole = num_bytes // LINE * LINE
    for at in range(0, whole, LINE):
        _stream_line(to + at, source + at)
    _copy(to + whole, source + whole, num_bytes - whole)
    _fence()


# ---- sums of two ------------------------------------------------------------------------------------
# Whole lines at once, written as vectors: the output may be one of the inputs, which prevents
# auto-vectorization. Every rank runs the same code with the ranks' parts in the same order, so that even
# the bits of NaNs are equal.


def _whole(builder: Builder, a: Value, b: Value) -> Value:
    return builder.add(a, b)


def _floating(builder: Builder, a: Value, b: Value) -> Value:
    return builder.fadd(a, b)


def _either(builder: Builder, a: Value, b: Value) -> Value:
    return builder.or_(a, b)


def _half(builder: Builder, a: Value, b: Value) -> Value:
    """Sum of 16-bit numbers in float32, as torch adds them."""
    wide = ir.VectorType(ir.FloatType(), a.type.count)
    return builder.fptrunc(builder.fadd(builder.fpext(a, wide), builder.fpext(b, wide)), a.type)


def _brain(builder: Builder, a: Value, b: Value) -> Value:
    """The upper halves of float32: widened, added, and rounded to even."""
    word, wide = (ir.VectorType(kind, a.type.count) for kind in (ir.IntType(32), ir.FloatType()))

    def all_are(value: int) -> Value:
        return ir.Constant(word, [value] * a.type.count)

    def widened(half: Value) -> Value:
        return builder.bitcast(builder.shl(builder.zext(half, word), all_are(16)), wide)

    total = builder.fadd(widened(a), widened(b))
    bits = builder.bitcast(total, word)
    is_odd = builder.and_(builder.lshr(bits, all_are(16)), all_are(1))
    rounded = builder.lshr(builder.add(bits, builder.add(is_odd, all_are(0x7FFF))), all_are(16))
    is_nan = builder.fcmp_unordered("uno", total, total)
    return builder.trunc(builder.select(is_nan, all_are(0x7FC0), rounded), a.type)


def _step(element: Any, count: int, plus: Callable[[Builder, Value, Value], Value]) -> Any:
    """The sum of so many elements at two addresses, to a third."""

    @_make  # type: ignore[untyped-decorator, unused-ignore]
    def step(typing_context: Any, to: Any, a: Any, b: Any) -> Any:
        def generate(context: Any, builder: Builder, signature: Any, args: Any) -> Value:
            out, *parts = (_at(builder, address, ir.VectorType(element, count)) for address in args)
            builder.store(plus(builder, *(builder.load(part, align=1) for part in parts)), out, align=1)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, types.int64), generate

    return step


def _adder(element: Any, num_bytes_each: int, plus: Callable[[Builder, Value, Value], Value]) -> Any:
    add_line, add_one = _step(element, LINE // num_bytes_each, plus), _step(element, 1, plus)

    @inlined
    def add(to: int, a: int, b: int, num_bytes: int) -> None:
        whole = num_bytes // LINE * LINE
        for at in range(0, whole, LINE):
            add_line(to + at, a + at, b + at)
        for at in range(whole, num_bytes, num_bytes_each):
            add_one(to + at, a + at, b + at)

    return add


def _has_half() -> bool:
    """Whether the processor converts float16: what stands in where it does not is not there for compiled loops."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return True
    config: Any = numba.config
    return config.CPU_NAME is None and bool(binding.get_host_cpu_features().get("f16c"))


HAS_HALF = _has_half()
_add_float32 = _adder(ir.FloatType(), 4, _floating)
_add_float64 = _adder(ir.DoubleType(), 8, _floating)
_add_bfloat16 = _adder(ir.IntType(16), 2, _brain)
_add_float16 = _adder(ir.HalfType(), 2, _half) if HAS_HALF else _add_bfloat16  # then it is never used
_add_int8 = _adder(ir.IntType(8), 1, _whole)
_add_int16 = _adder(ir.IntType(16), 2, _whole)
_add_int32 = _adder(ir.IntType(32), 4, _whole)
_add_int64 = _adder(ir.IntType(64), 8, _whole)
_add_bool = _adder(ir.IntType(8), 1, _either)


@inlined
def _add(kind: int, to: int, a: int, b: int, num_bytes: int) -> None:
    if kind == FLOAT32:
        _add_float32(to, a, b, num_bytes)
    elif kind == FLOAT64:
        _add_float64(to, a, b, num_bytes)
    elif kind == BFLOAT16:
        _add_bfloat16(to, a, b, num_bytes)
    elif kind == FLOAT16:
        _add_float16(to, a, b, num_bytes)
    elif kind == INT8:
        _add_int8(to, a, b, num_bytes)
    elif kind == INT16:
        _add_int16(to, a, b, num_bytes)
    elif kind == INT32:
        _add_int32(to, a, b, num_bytes)
    elif kind == INT64:
        _add_int64(to, a, b, num_bytes)
    else:
        _add_bool(to, a, b, num_bytes)


# ---- the ring ---------------------------------------------------------------------------------------


@inlined
def _counter(ring: Any, which: int, rank: int) -> Any:
    return ring.counters + (which * ring.num_ranks + rank) * LINE


@inlined
def _least(ring: Any, which: int) -> Any:
    """The slowest rank's counter of chunks put (0), summed (1) or taken (2)."""
    least = _load(_counter(ring, which, 0))
    for rank in range(1, ring.num_ranks):
        least = min(least, _load(_counter(ring, which, rank)))
    return least


@inlined
def _slot(ring: Any, rank: int, number: int) -> Any:
    return ring.rings + (rank * ring.num_chunks + number % ring.num_chunks) * ring.chunk_bytes


@inlined
def _size(ring: Any, work: Any, chunk: int) -> Any:
    return min(ring.chunk_bytes, work.num_bytes - chunk * ring.chunk_bytes)


@inlined
def _wanted(ring: Any, work: Any, chunk: int) -> Any:
    """The part of a chunk that this rank alone adds up."""
    size, before = _size(ring, work, chunk), chunk * ring.chunk_bytes
    return min(max(work.begin - before, 0), size), min(max(work.end - before, 0), size)


@inlined
def _share(ring: Any, rank: int, num_bytes: int) -> Any:
    """The beginning of a rank's share: whole lines, but for the end of the last."""
    return num_bytes if rank == ring.num_ranks else num_bytes // LINE * rank // ring.num_ranks * LINE


@inlined
def _put(ring: Any, work: Any) -> bool:
    """Write the next chunk into this rank's ring, once all ranks have read the previous content."""
    chunk, number = work.put, work.first + work.put
    if chunk == work.num_chunks or number >= _least(ring, 2) + ring.num_chunks:
        return False
    own, slot, size = (
        work.address + chunk * ring.chunk_bytes,
        _slot(ring, ring.rank, number),
        _size(ring, work, chunk),
    )
    if work.is_streamed:
        _stream(slot, own, size)
    elif work.is_scattered and ring.rank < 2:
        # What nobody else adds up is read from its source, by the first two ranks (`_sum`).
        begin, end = _wanted(ring, work, chunk)
        _copy(slot, own, begin)
        _copy(slot + end, own + end, size - end)
    else:
        _copy(slot, own, size)
    work.put = chunk + 1
    _store(_counter(ring, 0, ring.rank), number + 1)
    return True


@inlined
def _sum(ring: Any, work: Any) -> bool:
    """Sum the next chunk that all ranks have written, or this rank's share of it, in rank order."""
    chunk, number, rank = work.summed, work.first + work.summed, ring.rank
    if chunk == work.put or _least(ring, 0) <= number:
        return False
    own, begin, end = work.address + chunk * ring.chunk_bytes, 0, _size(ring, work, chunk)
    if work.gathered:
        for step in range(ring.num_ranks):  # not all from the same one at once
            other = (rank + step) % ring.num_ranks
            to = work.gathered + other * work.num_bytes + chunk * ring.chunk_bytes
            if other != rank:
                _copy(to, _slot(ring, other, number), end)
            elif to != own:
                _copy(to, own, end)
        end = 0
    if work.is_scattered:
        begin, end = _wanted(ring, work, chunk)
    if work.is_shared:
        begin, end = _share(ring, rank, end), _share(ring, rank + 1, end)
    for at in range(begin, end, _BLOCK):
        size = min(_BLOCK, end - at)
        # Of the first two, this rank's own is read from its source: the same numbers, with less cache use.
        total = own + at if rank == 0 else _slot(ring, 0, number) + at
        for other in range(1, ring.num_ranks):
            part = own + at if rank == other == 1 else _slot(ring, other, number) + at
            _add(work.kind, own + at, total, part, size)
            total = own + at
        if work.is_shared:
            # Written where no other rank reads this rank's own part.
            _copy(_slot(ring, rank, number) + at, own + at, size)
    work.summed = chunk + 1
    if work.is_shared:
        _store(_counter(ring, 1, rank), number + 1)
    else:
        work.taken = chunk + 1
        _store(_counter(ring, 2, rank), number + 1)
    return True


@inlined
def _take(ring: Any, work: Any) -> bool:
    """Copy the others' shares of the next chunk that all ranks have summed."""
    chunk, number = work.taken, work.first + work.taken
    if chunk == work.summed or _least(ring, 1) <= number:
        return False
    own, size = work.address + chunk * ring.chunk_bytes, _size(ring, work, chunk)
    for step in range(1, ring.num_ranks):  # not all from the same one at once
        other = (ring.rank + step) % ring.num_ranks
        begin, end = _share(ring, other, size), _share(ring, other + 1, size)
        _copy(own + begin, _slot(ring, other, number) + begin, end - begin)
    work.taken = chunk + 1
    _store(_counter(ring, 2, ring.rank), number + 1)
    return True


# Plain numbers, which become records inside: numba's handling of a record argument takes longer than a
# small sum.
_TYPES = (vector(types.int64), vector(types.int64, written=True))


@kernel((*_TYPES, INT))
def advance(ring_numbers: Any, work_numbers: Any, max_looks: int) -> int:
    """Advance as far as possible, until the work is DONE or `max_looks` polls in a row found nothing: SOME or NONE of it.

    Work near its end goes first: it is still in the cache.
    """
    ring, work = ring_numbers.view(RING)[0], work_numbers.view(WORK)[0]
    num_looks, outcome = 0, NONE
    while work.taken < work.num_chunks and num_looks <= max_looks:
        if _take(ring, work) or _sum(ring, work) or _put(ring, work):
            num_looks, outcome = 0, SOME
        else:
            num_looks += 1
    return DONE if work.taken == work.num_chunks else outcome


@kernel(_TYPES)
def put_ahead(ring_numbers: Any, work_numbers: Any) -> bool:
    """Write as much as there is room for, while earlier works are not yet summed; whether anything was written."""
    ring, work = ring_numbers.view(RING)[0], work_numbers.view(WORK)[0]
    before = work.put
    while _put(ring, work):
        pass
    return bool(work.put > before)

"""What the kernels share: moving the elements of one chunk, on a GPU at the width of its widest load.

In: addresses (int64), a count, dtypes. Each function is Triton code, inlined in a kernel.

Why it is written this way (seen in the code that Triton 3.6 and 3.7 make for sm_80 to sm_100 and gfx942; docs/kernels.md):
- A load is 128 bits wide only if the compiler can prove alignment, and that its mask changes at multiples of its width. Hence a branch on
  the address, and a mask against a count that was rounded down; the few elements left over move one by one.
- Where element sizes differ, 16-byte accesses on both sides would need an exchange through shared memory. Claiming a lesser alignment
  on the narrow side makes each thread own the same elements on both sides: 16 bytes on the wide one.
- A loop over masked blocks of several elements per thread makes such an exchange too: one element per access there.
- `simulated`: the interpreter truncates where a GPU rounds to the nearest even, and its float8 is wrong in several ways; there the bits
  are made by integer arithmetic.
"""

from __future__ import annotations

from rannc_backend.kernels.triton_support import jit, tl


@jit
def cast_to(x, dtype: tl.constexpr, simulated: tl.constexpr):
    """``x`` (float32 or float64) as ``dtype``, rounded to the nearest even; by way of float32 to 16 bits, as PyTorch does."""
    if dtype.primitive_bitwidth == 16:
        x = x.to(tl.float32)
    if dtype == tl.bfloat16:
        if simulated:
            bits = x.to(tl.int32, bitcast=True)
            bits = tl.where(x == x, bits + 0x7FFF + ((bits >> 16) & 1), bits | 0x400000)
            return (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return x.to(dtype)


@jit
def to_float8(x, simulated: tl.constexpr):
    """``x`` (float32, magnitude at most 448 or NaN) as e4m3, rounded to the nearest even."""
    if simulated:
        bits = x.to(tl.int32, bitcast=True)
        sign = (bits >> 24) & 0x80
        rounded = (bits & 0x7FFFFFFF) + 0x7FFFF + ((bits >> 20) & 1)
        normal = ((rounded >> 20) & 0x7FF) - (120 << 3)
        # Below 2**-6 steps are 2**-9: the sum with 1.5 * 2**14 has just these steps in float32.
        small = (((tl.abs(x) + 24576.0) - 24576.0) * 512.0).to(tl.int32)
        code = tl.where(x == x, tl.where(tl.abs(x) < 0.015625, small, normal), 0x7F)
        return (sign | code).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    return x.to(tl.float8e4nv)


@jit
def from_float8(x, simulated: tl.constexpr):
    """``x`` (e4m3) as float32."""
    values = x.to(tl.float32)
    if simulated:
        values = tl.where((x.to(tl.uint8, bitcast=True) & 0x7F) == 0x7F, float("nan"), values)
    return values


@jit
def copy_bytes(source, target, count, words: tl.constexpr, lanes: tl.constexpr):
    """``count`` bytes (at most 4 * ``words``) from address ``source`` to ``target``."""
    if ((source | target) & 15) == 0:
        from_words = tl.multiple_of(source.to(tl.pointer_type(tl.int32)), 16)
        to_words = tl.multiple_of(target.to(tl.pointer_type(tl.int32)), 16)
        offsets = tl.arange(0, words)
        inside = offsets < ((count >> 4) << 2)
        tl.store(to_words + offsets, tl.load(from_words + offsets, mask=inside), mask=inside)
        if (count & 15) != 0:
            rest = ((count >> 4) << 4) + tl.arange(0, 16)
            from_bytes, to_bytes = source.to(tl.pointer_type(tl.int8)), target.to(tl.pointer_type(tl.int8))
            tl.store(to_bytes + rest, tl.load(from_bytes + rest, mask=rest < count), mask=rest < count)
    elif ((source | target | count) & 3) == 0:
        copy_one_by_one(source, target, count >> 2, tl.int32, lanes)
    else:
        copy_one_by_one(source, target, count, tl.int8, lanes)


@jit
def copy_one_by_one(source, target, count, dtype: tl.constexpr, lanes: tl.constexpr):
    """``count`` items of ``dtype`` between addresses that need not be aligned to more than an item; four loads per thread at a time."""
    from_items, to_items = source.to(tl.pointer_type(dtype)), target.to(tl.pointer_type(dtype))
    first = count * 0 + tl.arange(0, lanes)
    start = count * 0
    while start < count:
        second, third, fourth = first + lanes, first + 2 * lanes, first + 3 * lanes
        a = tl.load(from_items + first, mask=first < count)
        b = tl.load(from_items + second, mask=second < count)
        c = tl.load(from_items + third, mask=third < count)
        d = tl.load(from_items + fourth, mask=fourth < count)
        tl.store(to_items + first, a, mask=first < count)
        tl.store(to_items + second, b, mask=second < count)
        tl.store(to_items + third, c, mask=third < count)
        tl.store(to_items + fourth, d, mask=fourth < count)
        first += 4 * lanes
        start += 4 * lanes


@jit
def move_elements(
    source,
    target,
    count,
    factor,
    accumulate,
    from_dtype: tl.constexpr,
    to_dtype: tl.constexpr,
    compute: tl.constexpr,
    statistics: tl.constexpr,
    store: tl.constexpr,
    block: tl.constexpr,
    lanes: tl.constexpr,
    simulated: tl.constexpr,
):
    """``count`` elements (at most ``block``) of ``from_dtype``, times ``factor``, to ``to_dtype``; added to what is there on request.

    Gives the sum of squares of what was written and how many of it are infinite or NaN; zeros without ``statistics``.
    """
    from_bytes: tl.constexpr = from_dtype.primitive_bitwidth // 8
    to_bytes: tl.constexpr = to_dtype.primitive_bitwidth // 8
    from_items, to_items = source.to(tl.pointer_type(from_dtype)), target.to(tl.pointer_type(to_dtype))
    squares = tl.zeros((), dtype=compute)
    num_bad = tl.zeros((), dtype=tl.int32)
    if ((source | target) & 15) == 0:
        aligned_from = tl.multiple_of(from_items, 16 * from_bytes // to_bytes if from_bytes < to_bytes else 16)
        aligned_to = tl.multiple_of(to_items, 16 * to_bytes // from_bytes if to_bytes < from_bytes else 16)
        vectors = (count >> 3) << 3
        squares, num_bad = _move_at_once(
            aligned_from, aligned_to, 0, vectors, factor, accumulate, compute, statistics, store, block, simulated
        )
        if vectors < count:
            more_squares, more_bad = _move_at_once(
                from_items, to_items, vectors, count, factor, accumulate, compute, statistics, store, 8, simulated
            )
            squares += more_squares
            num_bad += more_bad
    else:
        squares, num_bad = _move_one_by_one(
            from_items, to_items, count, factor, accumulate, compute, statistics, store, lanes, simulated
        )
    return squares, num_bad


@jit
def _move_at_once(
    source,
    target,
    start,
    stop,
    factor,
    accumulate,
    compute: tl.constexpr,
    statistics: tl.constexpr,
    store: tl.constexpr,
    block: tl.constexpr,
    simulated: tl.constexpr,
):
    offsets = start + tl.arange(0, block)
    values = _load(source, target, offsets, offsets < stop, factor, accumulate, compute)
    written = _store(values, target, offsets, offsets < stop, compute, store, simulated)
    squares = tl.zeros((), dtype=compute)
    num_bad = tl.zeros((), dtype=tl.int32)
    if statistics:
        squares, num_bad = tl.sum(written * written), tl.sum(_is_bad(written))
    return squares, num_bad


@jit
def _move_one_by_one(
    source,
    target,
    count,
    factor,
    accumulate,
    compute: tl.constexpr,
    statistics: tl.constexpr,
    store: tl.constexpr,
    lanes: tl.constexpr,
    simulated: tl.constexpr,
):
    """One element per access, four accesses per thread at a time."""
    squares_by_lane = tl.zeros((lanes,), dtype=compute)
    bad_by_lane = tl.zeros((lanes,), dtype=tl.int32)
    first = count * 0 + tl.arange(0, lanes)
    start = count * 0
    while start < count:
        second, third, fourth = first + lanes, first + 2 * lanes, first + 3 * lanes
        a = tl.load(source + first, mask=first < count, other=0.0)
        b = tl.load(source + second, mask=second < count, other=0.0)
        c = tl.load(source + third, mask=third < count, other=0.0)
        d = tl.load(source + fourth, mask=fourth < count, other=0.0)
        # One branch for all four: with one for each, every access would wait for the one before.
        if accumulate:
            e = tl.load(target + first, mask=first < count, other=0.0)
            f = tl.load(target + second, mask=second < count, other=0.0)
            g = tl.load(target + third, mask=third < count, other=0.0)
            h = tl.load(target + fourth, mask=fourth < count, other=0.0)
            a_sum, b_sum = a.to(compute) * factor + e.to(compute), b.to(compute) * factor + f.to(compute)
            c_sum, d_sum = c.to(compute) * factor + g.to(compute), d.to(compute) * factor + h.to(compute)
        else:
            a_sum, b_sum, c_sum, d_sum = a.to(compute) * factor, b.to(compute) * factor, c.to(compute) * factor, d.to(compute) * factor
        a_sum = _store(a_sum, target, first, first < count, compute, store, simulated)
        b_sum = _store(b_sum, target, second, second < count, compute, store, simulated)
        c_sum = _store(c_sum, target, third, third < count, compute, store, simulated)
        d_sum = _store(d_sum, target, fourth, fourth < count, compute, store, simulated)
        if statistics:
            squares_by_lane += a_sum * a_sum + b_sum * b_sum + (c_sum * c_sum + d_sum * d_sum)
            bad_by_lane += _is_bad(a_sum) + _is_bad(b_sum) + _is_bad(c_sum) + _is_bad(d_sum)
        first += 4 * lanes
        start += 4 * lanes
    squares = tl.zeros((), dtype=compute)
    num_bad = tl.zeros((), dtype=tl.int32)
    if statistics:
        squares, num_bad = tl.sum(squares_by_lane), tl.sum(bad_by_lane)
    return squares, num_bad


@jit
def _load(source, target, offsets, inside, factor, accumulate, compute: tl.constexpr):
    values = tl.load(source + offsets, mask=inside, other=0.0).to(compute) * factor
    if accumulate:
        values += tl.load(target + offsets, mask=inside, other=0.0).to(compute)
    return values


@jit
def _store(values, target, offsets, inside, compute: tl.constexpr, store: tl.constexpr, simulated: tl.constexpr):
    written = cast_to(values, target.dtype.element_ty, simulated)
    if store:
        tl.store(target + offsets, written, mask=inside)
    return written.to(compute)


@jit
def _is_bad(values):
    return tl.where(tl.abs(values) < float("inf"), 0, 1)

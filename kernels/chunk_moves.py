"""What the kernels share: moving the elements of one chunk, on a GPU at the width of its widest load.

In: addresses (int64), a count, dtypes. Each function is Triton code, inlined in a kernel.

Why it is written this way (seen in the code that Triton 3.6 and 3.7 make for sm_80 to sm_100 and gfx942;
docs/kernels.md):
- A load is 128 bits wide only if the compiler can prove alignment, and that its mask changes at multiples of
  its width. Hence a branch on the address, and a mask against a count that was rounded down; the few elements
  left over move one by one.
- Where element sizes differ, 16-byte accesses on both sides would need an exchange through shared memory.
  Claiming a lesser alignment on the narrow side makes each thread own the same elements on both sides: 16
  bytes on the wide one.
- A loop over masked blocks of several elements per thread makes such an exchange too: one element per access
  there.
- `simulated`: the interpreter truncates where a GPU rounds to the nearest even, and its float8 is wrong in
  several ways; there the bits are made by integer arithmetic.
"""

from __future__ import annotations

from rannc_backend.kernels.triton_support import jit, tl


@jit
def cast_to(x, dtype: tl.constexpr, simulated: tl.constexpr):
    """``x`` (float32 or float64) as ``dtype``, rounded to the nearest even; by way of float32 to 16 bits, as
    PyTorch does.
    """
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
    """``count`` items of ``dtype`` between addresses that need not be aligned to more than an item; four
    loads per thread at a time.
    """
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
    accumulate,
    from_dtype: tl.constexpr,
    to_dtype: tl.constexpr,
    compute: tl.constexpr,
    block: tl.constexpr,
    lanes: tl.constexpr,
    simulated: tl.constexpr,
    times: tl.constexpr = 1.0,
    over: tl.constexpr = 1.0,
):
    """``count`` elements (at most ``block``) of ``from_dtype`` to ``to_dtype``; added, in ``compute``, to
    what is there on request. ``times``, ``over``: numbers to multiply by and to divide by before that.
    """
    from_bytes: tl.constexpr = from_dtype.primitive_bitwidth // 8
    to_bytes: tl.constexpr = to_dtype.primitive_bitwidth // 8
    from_items, to_items = source.to(tl.pointer_type(from_dtype)), target.to(tl.pointer_type(to_dtype))
    if ((source | target) & 15) == 0:
        aligned_from = tl.multiple_of(
            from_items, 16 * from_bytes // to_bytes if from_bytes < to_bytes else 16
        )
        aligned_to = tl.multiple_of(to_items, 16 * to_bytes // from_bytes if to_bytes < from_bytes else 16)
        vectors = (count >> 3) << 3
        _move_at_once(
            aligned_from, aligned_to, 0, vectors, accumulate, compute, block, simulated, times, over
        )
        if vectors < count:
            _move_at_once(
                from_items, to_items, vectors, count, accumulate, compute, 8, simulated, times, over
            )
    else:
        _move_one_by_one(from_items, to_items, count, accumulate, compute, lanes, simulated, times, over)


@jit
def scaled(x, times: tl.constexpr, over: tl.constexpr):
    """``x`` (float32 or float64) times one number, divided by another; each is rounded once."""
    if times != 1.0:
        x = x * times
    if over != 1.0:
        # A plain division of float32 is an approximation on a GPU.
        x = tl.div_rn(x, tl.full(x.shape, over, tl.float32)) if x.dtype == tl.float32 else x / over
    return x


@jit
def _move_at_once(
    source,
    target,
    start,
    stop,
    accumulate,
    compute: tl.constexpr,
    block: tl.constexpr,
    simulated: tl.constexpr,
    times: tl.constexpr,
    over: tl.constexpr,
):
    offsets = start + tl.arange(0, block)
    inside = offsets < stop
    values = scaled(tl.load(source + offsets, mask=inside, other=0.0).to(compute), times, over)
    if accumulate:
        values += tl.load(target + offsets, mask=inside, other=0.0).to(compute)
    _store(values, target, offsets, inside, simulated)


@jit
def _move_one_by_one(
    source,
    target,
    count,
    accumulate,
    compute: tl.constexpr,
    lanes: tl.constexpr,
    simulated: tl.constexpr,
    times: tl.constexpr,
    over: tl.constexpr,
):
    """One element per access, four accesses per thread at a time."""
    first = count * 0 + tl.arange(0, lanes)
    start = count * 0
    while start < count:
        second, third, fourth = first + lanes, first + 2 * lanes, first + 3 * lanes
        a = tl.load(source + first, mask=first < count, other=0.0).to(compute)
        b = tl.load(source + second, mask=second < count, other=0.0).to(compute)
        c = tl.load(source + third, mask=third < count, other=0.0).to(compute)
        d = tl.load(source + fourth, mask=fourth < count, other=0.0).to(compute)
        a, b = scaled(a, times, over), scaled(b, times, over)
        c, d = scaled(c, times, over), scaled(d, times, over)
        # One branch for all four: with one for each, every access would wait for the one before.
        if accumulate:
            e = tl.load(target + first, mask=first < count, other=0.0)
            f = tl.load(target + second, mask=second < count, other=0.0)
            g = tl.load(target + third, mask=third < count, other=0.0)
            h = tl.load(target + fourth, mask=fourth < count, other=0.0)
            a, b = a + e.to(compute), b + f.to(compute)
            c, d = c + g.to(compute), d + h.to(compute)
        _store(a, target, first, first < count, simulated)
        _store(b, target, second, second < count, simulated)
        _store(c, target, third, third < count, simulated)
        _store(d, target, fourth, fourth < count, simulated)
        first += 4 * lanes
        start += 4 * lanes


@jit
def _store(values, target, offsets, inside, simulated: tl.constexpr):
    tl.store(target + offsets, cast_to(values, target.dtype.element_ty, simulated), mask=inside)

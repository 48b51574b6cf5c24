"""The five-point stencil as a Triton kernel, bound by memory: each element comes from it once and goes to it once.

A program computes one tile. All its loads are independent, so that many are under way; the neighbours of a row come from
the caches. Threads take single elements, not vectors of four: a load shifted by one column cannot be a vector, and four
elements a thread would make a warp touch four cache lines for each. `pitch` is kept from the compiler's eyes for that; rows
start on cache lines all the same, and whole tiles fit into them, so that no column needs a mask.
"""

# mypy: ignore-errors
# Triton gives annotations of a kernel's parameters a meaning of its own.
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["pitch"])
def sweep(
    new,
    old,
    sums,
    pitch,
    nx,
    first,
    last,
    stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    NORM: tl.constexpr,
):
    """One iteration of rows `first` to `last` (exclusive) of a slab; the next tile starts `stride` rows further down.

    `sums` gets the squared change of each program's tile, where NORM.
    """
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    rows = first + tl.program_id(1) * stride + tl.arange(0, ROWS)
    inside = (rows < last)[:, None]
    inner = ((columns >= 1) & (columns < nx - 1))[None, :]
    places = rows.to(tl.int64)[:, None] * pitch + columns[None, :]  # a grid may have more than 2^31 elements
    here = tl.load(old + places, mask=inside, other=0.0)
    left = tl.load(old + places - 1, mask=inside, other=0.0)
    right = tl.load(old + places + 1, mask=inside, other=0.0)
    above = tl.load(old + places - pitch, mask=inside, other=0.0)
    below = tl.load(old + places + pitch, mask=inside, other=0.0)
    value = (left + right + above + below) * 0.25
    # The outer columns are the boundary and stay: so that whole rows are stored.
    tl.store(new + places, tl.where(inner, value, here), mask=inside)
    if NORM:
        change = tl.where(inner & inside, (value - here) * (value - here), 0.0)
        tl.store(sums + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0), tl.sum(change))

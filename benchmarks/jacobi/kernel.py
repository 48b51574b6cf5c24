"""The five-point stencil as a Triton kernel: each element comes from memory once, and goes once.

A program computes one tile, a thread four neighbouring columns of it: rows come and go as vectors,
and each is loaded once for the three rows that need it. All loads of a tile are independent and
before its stores, so that many are under way. Of a column's neighbours only the outer two of every
four are loaded again, from the caches. Rows start on cache lines and whole tiles fit into them, so
that no column needs a mask.
"""

# mypy: ignore-errors
# ruff: noqa: RUF005 - Triton adds tuples and cannot unpack them
# Triton gives annotations of a kernel's parameters a meaning of its own.
import triton
import triton.language as tl


@triton.jit
def fours(start, mask, THREADS: tl.constexpr):
    """The four elements from each pointer on, as four tensors."""
    loaded = tl.load(start[:, None] + tl.arange(0, 4)[None, :], mask=mask[:, None], other=0.0)
    even, odd = tl.split(tl.reshape(loaded, (THREADS, 2, 2)))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@triton.jit
def mean(one, two, three, four):
    """In the order of plain operators: results are equal to the last bit."""
    return (one + two + three + four) * 0.25


@triton.jit
def iterate(
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
    """One iteration of rows `first` to `last` (exclusive); the next tile is `stride` rows down.

    `new` and `old` are the buffers of a slab, with `pitch` elements from one row to the next, of
    which the first `nx` are the grid's. `sums` gets the squared change of each program's tile,
    where NORM.
    """
    THREADS: tl.constexpr = COLUMNS // 4
    columns = tl.program_id(0) * COLUMNS + 4 * tl.arange(0, THREADS)
    top = first + tl.program_id(1) * stride
    corner = top.to(tl.int64) * pitch  # a grid may have more than 2^31 elements
    source, target = old + corner + columns, new + corner + columns
    # Masks are vectors, one element a thread, though a row is inside for all threads or for none:
    # `fours` and the store give each element a second dimension.
    inside = columns >= 0  # always: a tile has at least one row
    # Row r of the tile is element r + 1 of these; around it are the rows above and below.
    above, here = fours(source - pitch, inside, THREADS), fours(source, inside, THREADS)
    a, b, c, d = (above[0], here[0]), (above[1], here[1]), (above[2], here[2]), (above[3], here[3])
    left, right = (), ()
    for row in tl.static_range(ROWS):
        inside = top + row + 0 * columns < last
        left = left + (tl.load(source + row * pitch - 1, mask=inside, other=0.0),)
        right = right + (tl.load(source + row * pitch + 4, mask=inside, other=0.0),)
        below = fours(source + (row + 1) * pitch, inside, THREADS)
        a, b, c, d = a + (below[0],), b + (below[1],), c + (below[2],), d + (below[3],)
    changed = tl.zeros((THREADS,), tl.float32)
    for row in tl.static_range(ROWS):
        inside = top + row + 0 * columns < last
        new_a = mean(left[row], b[row + 1], a[row], a[row + 2])
        new_b = mean(a[row + 1], c[row + 1], b[row], b[row + 2])
        new_c = mean(b[row + 1], d[row + 1], c[row], c[row + 2])
        new_d = mean(c[row + 1], right[row], d[row], d[row + 2])
        # The outer columns, and what lies beyond them, stay: so that whole rows are stored.
        new_a = tl.where((columns >= 1) & (columns < nx - 1), new_a, a[row + 1])
        new_b = tl.where(columns + 1 < nx - 1, new_b, b[row + 1])
        new_c = tl.where(columns + 2 < nx - 1, new_c, c[row + 1])
        new_d = tl.where(columns + 3 < nx - 1, new_d, d[row + 1])
        whole = tl.reshape(tl.join(tl.join(new_a, new_c), tl.join(new_b, new_d)), (THREADS, 4))
        tl.store(
            target[:, None] + row * pitch + tl.arange(0, 4)[None, :], whole, mask=inside[:, None]
        )
        if NORM:
            in_a, in_b = new_a - a[row + 1], new_b - b[row + 1]
            in_c, in_d = new_c - c[row + 1], new_d - d[row + 1]
            changed += tl.where(inside, in_a * in_a + in_b * in_b + in_c * in_c + in_d * in_d, 0.0)
    if NORM:
        tl.store(sums + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0), tl.sum(changed))

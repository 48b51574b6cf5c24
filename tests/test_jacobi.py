"""`benchmark=jacobi`: split grids give the solution of one rank, the kernel that of operators."""

import itertools
import math
import re
import subprocess
import sys

import pytest
import torch
from build import ROOT, composed_cell
from hypothesis import given
from hypothesis import strategies as some
from rank_cases import ASKED, KERNELS

from benchmarks.jacobi.derive import derive, output_lines
from benchmarks.jacobi.grid import EDGE, TILES, Slab, TorchStencil, split, tiles
from benchmarks.jacobi.request import PITCH
from benchmarks.record import read_study

CPU = torch.device("cpu")
# jacobi_memcpy's lines, as the documents hold them.
LINES = (
    re.compile(r"Num (GPU|CPU worker)s: (\d+)\. Using \1 ID: ((?:\d+, )+)"),
    re.compile(
        r"(\d+)x(\d+): 1 (GPU|CPU worker): +(\d+\.\d{4}) s, (\d+) \3s: +(\d+\.\d{4}) s, "
        r"speedup: +(\d+\.\d\d), efficiency: +(\d+\.\d\d) "
    ),
)


def cell_of(*asked, **where):
    return composed_cell("benchmark=jacobi", *asked, **where)


def solved(nx, ny, iterations):
    """The grid after some iterations, and the L2 norms of their changes, from the definition."""
    grid = [[0.0] * nx for _ in range(ny)]
    for y, row in enumerate(grid):
        row[0] = row[-1] = math.sin(2 * math.pi * y / (ny - 1))
    norms = []
    for _ in range(iterations):
        old, change = [row[:] for row in grid], 0.0
        for y, x in itertools.product(range(1, ny - 1), range(1, nx - 1)):
            grid[y][x] = 0.25 * (old[y][x - 1] + old[y][x + 1] + old[y - 1][x] + old[y + 1][x])
            change += (grid[y][x] - old[y][x]) ** 2
        grid[0], grid[-1] = grid[-2][:], grid[1][:]
        norms.append(math.sqrt(change))
    return torch.tensor(grid[1:-1]), norms


@pytest.mark.parametrize("name", ASKED)
@pytest.mark.parametrize("workers", [2, 3])
def test_a_split_grid_has_the_solution_of_the_whole_one(forked, workers, name):
    ranks = [found[list(ASKED).index(name)] for found in forked(f"jacobi_{workers}")]
    facts = ranks[0]["checks"]
    metrics = {key.removeprefix("jacobi/"): value for key, value in ranks[0]["metrics"].items()}
    assert facts["solution_difference"] == 0.0 < facts["solution_tolerance"]
    assert facts["exchange"] == ASKED[name].get("exchange", "host")
    speedup = metrics["one_gpu_seconds"] / metrics["seconds"]
    assert metrics["speedup"] == pytest.approx(speedup)
    assert metrics["efficiency"] == pytest.approx(speedup / workers)
    share = metrics["stencil_gb_per_s"] / metrics["copy_gb_per_s"]
    assert metrics["copy_share"] == pytest.approx(share)
    assert all({**other, "output": ""} == {**ranks[0], "output": ""} for other in ranks[1:])


def test_the_norm_and_the_count_of_points_are_those_of_the_definition(forked):
    metrics = forked("jacobi_2")[0][0]["metrics"]
    _, norms = solved(40, 23, 30)
    assert metrics["jacobi/iterations"] == 30
    assert metrics["jacobi/norm"] == pytest.approx(norms[29], rel=1e-4)
    gigabytes = 8 * 38 * 21 * 30 / 1e9
    speed = gigabytes / metrics["jacobi/one_gpu_seconds"]
    assert metrics["jacobi/stencil_gb_per_s"] == pytest.approx(speed)


def test_a_solve_ends_one_batch_after_the_tolerance_is_reached(forked):
    found = forked("jacobi_2")[0][list(ASKED).index("until_tolerance")]
    _, norms = solved(40, 23, 120)
    reached = next(number for number in range(7, 120, 7) if norms[number - 1] <= 2e-2)
    assert found["metrics"]["jacobi/iterations"] == reached + 7
    assert found["metrics"]["jacobi/norm"] == pytest.approx(norms[reached + 6], rel=1e-4)
    assert len(found["series"]["jacobi/solve_seconds"]) == 2


def test_a_halo_that_never_arrives_is_noticed(forked):
    for (found,) in forked("jacobi_deaf"):
        assert found["checks"]["solution_difference"] > 1e-3 > found["checks"]["solution_tolerance"]


def test_one_rank_alone_has_no_efficiency(forked):
    found = forked("jacobi_1")[0][0]
    assert "jacobi/efficiency" not in found["metrics"] and found["metrics"]["jacobi/seconds"] > 0
    assert found["checks"]["solution_difference"] == 0


def test_the_lines_are_jacobi_memcpys(forked):
    found = forked("jacobi_2")[0][0]
    head, line = found["output"].rstrip("\n").split("\n")
    assert LINES[0].fullmatch(head).groups() == ("CPU worker", "2", "0, 1, ")
    rows, columns, _, one, count, every, *_ = LINES[1].fullmatch(line).groups()
    assert (rows, columns, count) == ("23", "40", "2")
    for text, name in ((one, "one_gpu_seconds"), (every, "seconds")):
        assert float(text) == pytest.approx(found["metrics"][f"jacobi/{name}"], abs=5.1e-5)


def test_clocks_of_long_solves_of_gpus_are_compared(hydra):
    def solves(purpose, seconds, device_seconds):
        line = {"kind": "solves", "purpose": purpose, "iterations_done": [5]}
        line |= {"nx": 9, "ny": 9, "norms": [0.1]}
        return line | {"seconds": [seconds], "device_seconds": [device_seconds]}

    copies = {"kind": "grid_copies", "bytes": 1000, "seconds": 0.5}
    lines = {
        0: [solves("one rank", 0.4, 0.4), copies, solves("all ranks", 0.2, 0.21)],
        1: [solves("all ranks", 0.25, 0.2)],
    }
    found = derive(lines, cell_of(gpus=(0, 1)))
    assert found.checks == {"clock_disagreement": pytest.approx(0.2)}
    assert found.metrics["jacobi/seconds"] == 0.25 and found.metrics["jacobi/copy_gb_per_s"] == 2e-6
    lines[0][2], lines[1][0] = (solves("all ranks", 0.05, 0.09) for _ in range(2))  # too short
    assert derive(lines, cell_of(gpus=(0, 1))).checks == {}


def test_the_document_s_line_is_printed_as_it_stands(hydra):
    assert output_lines(cell_of(gpus=(0, 3)), 16384, 16384, 3.9853, 2.0641) == [
        "Num GPUs: 2. Using GPU ID: 0, 3, ",
        "16384x16384: 1 GPU:   3.9853 s, 2 GPUs:   2.0641 s, "
        "speedup:     1.93, efficiency:    96.54 ",
    ]


@given(some.integers(1, 400), some.integers(1, 16))
def test_every_inner_row_has_one_rank(rows, ranks):
    by_rank = split(rows + 2, ranks)
    assert list(itertools.chain(*by_rank)) == list(range(1, rows + 1))
    counts = list(map(len, by_rank))
    assert counts == sorted(counts) and counts[-1] - counts[0] <= 1


def test_plain_operators_are_the_definition():
    slab = Slab(9, 8, split(8, 1)[0], CPU)
    stencil = TorchStencil(slab)
    expected, norms = solved(9, 8, 5)
    for number in range(1, 6):
        stencil.edges(number, norm=True)
        stencil.rest(number, norm=True)
        new = slab.buffers[number % 2]
        new[0], new[-1] = new[-2], new[1]
        assert math.sqrt(stencil.change()()) == pytest.approx(norms[number - 1], rel=1e-5)
    assert torch.allclose(slab.inner(5), expected, atol=1e-6)


@pytest.mark.parametrize(("number", "grid"), list(enumerate(KERNELS)), ids=map(str, KERNELS))
def test_the_kernel_computes_what_plain_operators_do(forked, number, grid):
    pytest.importorskip("triton")
    found = forked("jacobi_kernel")[0][number]
    assert found.pop("change") == pytest.approx(1, rel=1e-5)
    assert found == dict.fromkeys(found, True)


def test_whole_tiles_fit_into_every_row_of_a_gpu():
    for tile in (*TILES, EDGE):
        assert PITCH["cuda"] % tile.columns == 0 and tile.columns == 4 * 32 * tile.warps


def test_a_slab_is_cut_into_tiles_that_a_launch_can_count():
    assert tiles(2 * 65535) == list(TILES)
    assert {tile.rows for tile in tiles(4 * 65535 + 1)} == {8, 16}
    assert tiles(1_000_000)  # no grid has more rows (tests/golden/refusals.txt)


def on_gpus(tmp_path, *asked):
    command = [sys.executable, "launch.py", "benchmark=jacobi", "tracking=none", *asked]
    command.append(f"output_dir={tmp_path}")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    (study,) = tmp_path.glob("default*")
    ((record,), _) = read_study(study)
    return record


@pytest.mark.multi_gpu(shared=True)
@pytest.mark.parametrize("exchange", ["peer", "host", "nccl"])
@pytest.mark.parametrize("nx,ny", [(16384, 16384), (1000, 5), (3000, 777)])
def test_gpus_find_the_solution_of_one(tmp_path, sharing, exchange, nx, ny):
    options = (f"exchange={exchange}", "niter=200", f"nx={nx}", f"ny={ny}")
    record = on_gpus(tmp_path, "gpus=0,1", *sharing, *(f"benchmark.{option}" for option in options))
    assert record.checks["solution_difference"] <= record.checks["solution_tolerance"]
    assert "solution_differs" not in record.validity.codes


@pytest.mark.gpu
def test_the_stencil_is_within_a_tenth_of_what_memory_allows(tmp_path):
    assert on_gpus(tmp_path, "gpus=0").metrics["jacobi/copy_share"] >= 0.9

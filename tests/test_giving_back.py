"""What ranks give back between two cells: real ranks measure one cell after the other, and some cells leave something."""

import dataclasses
import json
import signal

import pytest
from cells import make_cell
from cells_in_turn import CLEAN, FAULTS

from benchmarks.derived import complete
from benchmarks.rank.giving_back import Held, Left
from benchmarks.rank.giving_back.process import ProcessState
from conf import groups
from conf.options import Refused

SAYS = {
    "tensor": "kept 73 MB of memory in tensors",
    "thread": "left 1 thread (left over) running",
    "file": "left 1 file (",
    "sockets": "has 2 descriptors (socket) more than after its first cell",
    "shared_memory": "left 1 file (ringside-",
    "tf32": "changed torch.backends.cuda.matmul.allow_tf32",
    "cudnn": "changed torch.backends.cudnn.deterministic",
    "compiler": "changed torch._dynamo.config.recompile_limit",
    "threads_that_compute": "changed torch's num_threads",
    "dtype": "changed torch's default_dtype",
    "variable": "changed the environment variable LEFT_BY_A_CELL",
    "variable_gone": "changed the environment variable OMP_NUM_THREADS",
    "frozen": "changed what garbage collection looks at (gc.freeze)",
    "umask": "changed the umask",
    "working_folder": "changed the folder",
    "handler": "changed the handler of SIGUSR1",
    "cores": "changed the cores that it may use",
}


@pytest.mark.parametrize("name", CLEAN)
def test_a_strategy_gives_back_all_that_it_took(forked, name):
    for rank in forked("cells_in_turn"):
        found, first = rank["cells"][name], rank["cells"]["none"]
        assert found["kept"] == []
        assert not found["model_is_there"], "something still holds the model"
        assert (found["line"]["threads"], found["line"]["files"]) == (first["line"]["threads"], first["line"]["files"])


@pytest.mark.parametrize("fault", FAULTS)
def test_what_a_cell_leaves_is_told_and_does_not_reach_the_next_cell(forked, fault):
    found = forked("cells_in_turn")[0]["faults"][fault]
    if fault == "nothing":
        assert found["kept"] == []
    else:
        assert any(one.startswith(SAYS[fault]) for one in found["kept"])
    assert found["after"] == []
    assert found["random"] == forked("cells_in_turn")[0]["faults"]["nothing"]["random"], "the generator goes on"


def test_a_signal_of_real_time_has_no_name():
    before = ProcessState.now()
    kept = signal.signal(signal.SIGRTMIN + 1, lambda number, frame: None)
    try:
        now = ProcessState.now()
    finally:
        signal.signal(signal.SIGRTMIN + 1, kept)
    assert before.changed(now) == [f"the handler of signal {signal.SIGRTMIN + 1}"]


def held(**differs):
    """What a rank on a GPU holds."""
    return dataclasses.replace(
        Held(
            allocated_bytes=0, reserved_bytes=2 << 20, used_bytes=700 << 20, pinned_bytes=0, rss_bytes=3 << 30,
            threads={"python": 9}, python_threads={1: "MainThread"}, files={0: "/dev/null", 7: "/dev/nvidia0"}, shared_files=[],
        ),
        **differs,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("differs", "says"),
    [
        ({"reserved_bytes": 66 << 20, "used_bytes": 764 << 20}, []),
        ({"reserved_bytes": 72 << 20, "used_bytes": 770 << 20}, ["kept 73 MB of GPU memory"]),
        ({"allocated_bytes": 150 << 20}, ["kept 89 MB of GPU memory"]),
        ({"pinned_bytes": 128 << 20}, ["kept 134 MB of page-locked memory"]),
        ({"used_bytes": 950 << 20}, []),
        ({"used_bytes": 960 << 20}, ["finds 273 MB more of its GPU taken than after its first cell, not by torch"]),
        ({"rss_bytes": 5 << 30}, ["occupies 2147 MB more of the host's memory than after its first cell"]),
        ({"threads": {"python": 11}}, []),
        ({"threads": {"python": 12}}, ["has 3 threads (python) more than after its first cell"]),
        ({"files": {n: "/dev/nvidia0" for n in range(20)}}, []),
        ({"files": {n: "socket" for n in range(12)}}, []),
        ({"files": {n: "socket" for n in range(13)}}, ["has 13 descriptors (socket) more than after its first cell"]),
        ({"files": {9: "/dev/shm/left"}}, ["left 1 file (/dev/shm/left) open"]),
        ({"files": {n: f"/{n}" for n in range(5)}}, ["left 5 files (/0, /1, /2, …) open"]),
    ],
)
def test_limits_on_a_gpu(differs, says):
    assert held(**differs).beyond(held(), held()) == says


def test_the_record_has_what_each_rank_held_and_kept():
    line = {
        "kind": "given_back",
        "time": 1.0,
        **Left(held(), ["torch's grad_mode"], ["changed torch's grad_mode"]).line(),
    }
    lines = {rank: [line, {"kind": "result", "time": 1.0}] for rank in (0, 1)}
    (first, second) = complete(lines, dataclasses.replace(make_cell(), declared={}))["checks"]["given_back"]
    assert (first["rank"], second["rank"], first["kept"]) == (0, 1, ["changed torch's grad_mode"])
    assert json.loads(json.dumps(first))["threads"] == 9


def test_a_strategy_says_whether_ranks_may_go_on_after_it():
    warm = {name for name in groups.choices("strategy") if groups.choice("strategy", name).warm}
    assert warm >= {"none", "nccl_allreduce", "kvstore_device", "hierarchical"}
    assert not any(name.startswith(("cpu_staged", "kvstore_dist", "kvstore_local")) for name in warm)


def test_warm_is_true_or_false(tmp_path):
    path = tmp_path / "strategy" / "mine.yaml"
    path.parent.mkdir()
    path.write_text("name: mine\n_target_: mine.Mine\nwarm: often\n")
    groups.search_also([tmp_path])
    try:
        with pytest.raises(Refused, match="warm is 'often'; accepted is true or false"):
            groups.choice("strategy", "mine")
    finally:
        groups.search_also([])


@pytest.mark.gpu
def test_memory_of_a_gpu_comes_back_and_a_leak_is_told():
    import torch

    from benchmarks.rank.giving_back import Baseline, give_back, left
    from trainers.kvstore import cuda_copies
    from trainers.step import set_arithmetic

    device, cell = torch.device("cuda", 0), make_cell(strategy={"name": "none"})

    def used(leaks):
        set_arithmetic(cell.precision)
        square = torch.rand(4096, 4096, device=device)
        (square @ square).cpu().pin_memory()
        locked = torch.empty(1 << 24, dtype=torch.uint8)
        cuda_copies.page_lock(locked.data_ptr(), locked.nbytes)  # refused if it is locked already
        cuda_copies.give_back(locked.data_ptr(), [])
        return [torch.ones(50 << 20, device=device)] if leaks else []

    baseline, first_idle = Baseline.now(device), None
    for leaks in (False, False, True):
        kept = used(leaks)
        found = left(baseline, device, first_idle, give_back(baseline, device, cell))
        first_idle = first_idle or found
        assert [one.endswith("MB of GPU memory") for one in found.kept] == [True] * leaks
        del kept

"""What torch.compile made: where it is kept, that equal cells find it, what records say of it."""

import dataclasses
import os

import pytest
import torch
from build import make_cell, make_record
from own_user import QUIET, user
from torch import nn

from analysis.validity.results import not_compiled
from benchmarks.rank.cell_process import READ_LATE
from benchmarks.record import read_study
from benchmarks.timing import compilation
from benchmarks.timing.compilation import Compilation
from conf.schema import ValidityLimits
from launch.engines.environment import INDUCTOR, TRITON, compile_cache_variables


def compiled_cell(**changes):
    return make_cell(**{"optimize": "compile", **changes})


def test_all_studies_of_an_output_folder_have_one_folder_for_what_is_compiled(tmp_path):
    folder = tmp_path / ".compiled"
    for _ in range(2):  # it may be there already
        variables = compile_cache_variables(compiled_cell(), tmp_path, {})
        assert variables == {INDUCTOR: str(folder), TRITON: str(folder / "triton")}
    assert folder.stat().st_mode & 0o777 == 0o700, "torch runs what it finds there"
    own = compile_cache_variables(compiled_cell(), tmp_path, {TRITON: "/mine"})
    assert own.keys() == {INDUCTOR}


@pytest.mark.parametrize(
    ("changes", "around"),
    [({"optimize": "eager"}, {}), ({"hosts": ("a", "b")}, {}), ({}, {INDUCTOR: "/scratch/me"})],
    ids=["eager", "on other hosts", "the user's own"],
)
def test_other_cells_and_a_users_own_folder_stay_as_they_are(changes, around, tmp_path):
    cell = compiled_cell(**changes)
    assert compile_cache_variables(cell, tmp_path, around) == {} and not list(tmp_path.iterdir())


def test_a_folder_that_others_may_write_to_or_the_compiler_cannot_name_is_not_used(
    tmp_path, monkeypatch
):
    strange = tmp_path / "out puts%20#1"
    assert compile_cache_variables(compiled_cell(), strange, {}) == {} and not strange.exists()
    (tmp_path / ".compiled").mkdir()
    for mode, is_used in ((0o770, False), (0o700, True)):
        (tmp_path / ".compiled").chmod(mode)
        assert bool(compile_cache_variables(compiled_cell(), tmp_path, {})) == is_used
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert compile_cache_variables(compiled_cell(), tmp_path, {}) == {}, "another user's"


def test_torch_reads_the_folder_each_time_so_ranks_need_not_start_anew(tmp_path, monkeypatch):
    from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCache
    from torch._inductor.codecache import FxGraphCache
    from torch._inductor.runtime.cache_dir_utils import triton_cache_dir

    for number in (1, 2):
        monkeypatch.setenv(INDUCTOR, str(tmp_path / str(number)))
        monkeypatch.setenv(TRITON, str(tmp_path / str(number) / "triton"))
        caches = [FxGraphCache._get_tmp_dir(), AOTAutogradCache._get_tmp_dir(), triton_cache_dir(0)]
        assert all(cache.startswith(f"{tmp_path}/{number}/") for cache in caches), caches
    assert {INDUCTOR, TRITON} <= {*READ_LATE}


def test_only_what_cannot_change_a_graph_may_differ():
    cell = compiled_cell()
    nccl = {"NCCL_ALGO": "Ring"}
    for same in (
        dataclasses.replace(cell, nccl=nccl, repeat=3, labels=("x",), profiler="torch"),
        dataclasses.replace(cell, benchmark={**cell.benchmark, "max_seconds": 9.0}),
        cell.untimed_pass("tuning_pass", "somewhere.run"),
        dataclasses.replace(cell, optimize="compile_graph"),
    ):
        assert same.graph == cell.graph
    for change in (
        {"batch_size": 4},
        {"optimize": "max"},
        {"precision": "bf16"},
        {"channels_last": True},
        {"strategy": {**cell.strategy, "bucket_cap_mb": 1.0}},
        {"model": dataclasses.replace(cell.model, options={"depth": 2})},
    ):
        assert dataclasses.replace(cell, **change).graph not in (cell.graph, "")
    assert make_cell().graph == ""


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, inputs):
        return self.layer(inputs).relu()


def test_what_runs_compiled_leaves_a_part_in_autograds_graph():
    model, inputs = Small(), torch.ones(2, 4)
    assert compilation.parts({"outputs": [torch.compile(model, backend="aot_eager")(inputs)]}) == 1
    assert compilation.parts(model(inputs)) == 0 and compilation.parts((torch.ones(1), None)) == 0


class Alone:
    def gather(self, values):
        return [list(values)]


def test_graphs_and_breaks_are_counted_and_a_compiler_that_does_nothing_is_seen():
    counted = Compilation(True)
    assert counted.since() == {"graphs": 0, "graph_breaks": 0}

    def step(x):
        x = x + 1
        torch._dynamo.graph_break()
        return x * 2

    torch.compile(step, backend="eager")(torch.ones(2))
    counts = {"graphs": 2, "graph_breaks": 1}
    assert counted.since() == counts
    assert counted.since() == {"graphs": 0, "graph_breaks": 0}
    facts = counts | {"code_from": "new", "from_cache": 0, "newly_made": 0}
    assert counted.facts(Alone()) == facts
    later = Compilation(True).facts(Alone())  # an earlier one had some
    assert later == {"graphs": 0, "code_from": "nowhere"}
    assert Compilation(False).since() == {} == Compilation(False).facts(Alone())


@pytest.mark.parametrize(
    ("facts", "parts", "is_fault"),
    [
        ({"graphs": 1}, None, False),
        ({"graphs": 0}, None, True),
        ({"graphs": 1}, 0, True),
        ({"graphs": 1, "code_from": "cache"}, 2, False),
        ({"graphs": 0, "code_from": "nowhere"}, 2, True),
        ({"graphs": 0, "code_from": "nowhere"}, 0, True),
    ],
)
def test_a_cell_is_compiled_if_compiled_parts_ran_and_were_made_in_it(facts, parts, is_fault):
    arithmetic = {"autocast": None, "tf32": False, "layers": {}}
    if parts is not None:
        arithmetic["compiled_parts"] = parts
    record = make_record(checks={**facts, "arithmetic": arithmetic}, cell=compiled_cell())
    assert (not_compiled.judge(record, ValidityLimits()) is not None) == is_fault


LAYERS = """
from torch import nn


class Layers(nn.Module):
    def __init__(self, inputs, classes):
        super().__init__()
        self.first, self.last = nn.Linear(inputs, 8), nn.Linear(8, classes)

    def forward(self, images):
        return self.last(self.first(images.flatten(1)).relu())


def build(classes, channels):
    return Layers(channels * 32 * 32, classes)
"""
SHORT = """
-m device=cpu gpus=0,1 optimize=compile model.library=python model.builder=layers:build
model.name=layers image_size=32 batch_size=4 noise_pairs=0 benchmark.min_iterations=3
benchmark.exchange_iterations=3 benchmark.limit_iterations=0 benchmark.exposed_rounds=1
benchmark.warmup_min_seconds=0
"""
WRONG = {"not_compiled", "weights_still", "gradient_not_mean", "exchange_wrong"}


@pytest.mark.timeout(600)  # a slow machine compiles for minutes
@pytest.mark.needs("C++")
def test_what_a_cell_compiled_is_found_by_the_next_one_and_by_a_new_study(tmp_path, monkeypatch):
    for name in (INDUCTOR, TRITON):  # torch has set it, if another test imported the compiler
        monkeypatch.delenv(name, raising=False)
    # Else torch compiles a program for each kind of vectors to see.
    monkeypatch.setenv("TORCHINDUCTOR_VEC_ISA_OK", "1")
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "layers.py").write_text(LAYERS)
    short, launched = (*SHORT.split(), *QUIET), user(tmp_path)
    done = launched(*short, "benchmark.max_seconds=0.1,0.2")
    records, _ = read_study(tmp_path / "outputs" / "default")
    states = [record.state for record in records]
    assert states == ["finished"] * 2, done.stdout + done.stderr
    first, second = sorted(records, key=lambda record: record.started_at)
    assert [record.checks["code_from"] for record in (first, second)] == ["new", "cache"]
    assert second.checks["newly_made"] == 0 < second.checks["from_cache"]
    parts = first.checks["arithmetic"]["compiled_parts"]
    for record in records:
        checks = record.checks
        assert (checks["graphs"], checks["timed_graphs"]) == (1, 0)
        assert checks["arithmetic"]["compiled_parts"] == parts > 0
        assert checks["replicas_equal"]
        assert checks["gradient_error"] <= checks["gradient_tolerance"]
        assert not WRONG & record.validity.codes.keys()
    launched(*short, "benchmark.max_seconds=0.1", "engine.start=exec", "study=another")
    (again,) = read_study(tmp_path / "outputs" / "another")[0]
    assert {rank["started"] for rank in again.ranks} == {"exec"}, "not forked as the first were"
    assert again.checks["code_from"] == "cache"
    assert again.checks["newly_made"] == 0 < again.checks["from_cache"]
    assert {row["part"] for row in again.tables["compiling"]["rows"]}

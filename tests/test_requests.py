"""Requests through launch.py itself: what is wrong is said in one line, before anything starts."""

import dataclasses
import importlib.util
import os
import re
import shlex
import subprocess
import sys

import psutil
import pytest
from build import ROOT, composed_cell, configuration
from hydra import compose
from omegaconf import OmegaConf

from benchmarks import record as records
from conf.cell import Cell
from conf.command_line import GROUPS, normalise
from conf.nccl import FIELDS
from conf.resolve import checked, resolve

CHOICES = {
    group: sorted(path.stem for path in (ROOT / "conf" / group).glob("*.yaml")) for group in GROUPS
}
FORBIDDING = [
    ("NCCL_NVLS_ENABLE", "0"),
    ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1"),
    ("NVSHMEM_DISABLE_NVLS", "1"),
]


@pytest.fixture
def refused(launch, tmp_path):
    """Run a wrong request for real (no dry run); returns its one line."""
    before = set(psutil.Process().children())

    def run(*arguments):
        code, out, err = launch(*arguments)
        assert (code, out) == (2, "")
        assert err.count("\n") == 1 and err.endswith("\n") and err.startswith("launch.py: ")
        assert set(psutil.Process().children()) <= before, "nothing was started"
        assert not (tmp_path / "outputs").exists()
        return err.removeprefix("launch.py: ").rstrip("\n")

    return run


@pytest.fixture
def planned(launch, tmp_path):
    """Plan only; returns the names of the cells."""

    def run(*arguments):
        code, out, err = launch(*arguments, "dry_run=true")
        assert (code, err) == (0, "")
        assert list(tmp_path.iterdir()) == []
        numbered = [line.split(maxsplit=1) for line in out.splitlines()]
        return [line[1] for line in numbered if line and line[0].isdigit() and " · " in line[1]]

    return run


def wrong_requests():
    """Arguments, and parts of the sentence; tests/golden/refusals.txt has more."""
    lines = (ROOT / "tests" / "data" / "wrong_requests.txt").read_text("utf-8").splitlines()
    for command, sentence in zip(lines[::2], lines[1::2], strict=True):
        yield pytest.param(shlex.split(command.removeprefix("$ ")), sentence, id=command)


@pytest.mark.parametrize(("arguments", "sentence"), list(wrong_requests()))
def test_a_wrong_request_is_one_sentence(refused, arguments, sentence):
    sentence = sentence.replace("{strategies}", ", ".join(CHOICES["strategy"]))
    start, *parts = sentence.replace("{strategies|}", "|".join(CHOICES["strategy"])).split(" … ")
    line = refused(*arguments)
    assert line.startswith(start)
    assert all(part in line for part in parts)


@pytest.mark.parametrize(("name", "value"), FORBIDDING)
def test_multicast_against_the_environment_is_refused(refused, planned, monkeypatch, name, value):
    for other, _ in FORBIDDING:
        monkeypatch.delenv(other, raising=False)
    assert name != FORBIDDING[0][0] or len(planned("nccl.nvls_enable=1")) == 1
    monkeypatch.setenv(name, value)
    says = f"nccl.nvls_enable=1: the environment forbids NVLink multicast ({name}={value})"
    assert refused("nccl.nvls_enable=1").startswith(says)


def test_a_library_that_is_not_installed_is_named_with_its_extra(refused, monkeypatch):
    find = importlib.util.find_spec

    def without_timm(name, *rest):
        return None if name == "timm" else find(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", without_timm)
    line = refused("model.library=timm")
    assert line.startswith("model.library=timm: not installed")
    assert "pip install -e '.[timm]'" in line


@pytest.mark.parametrize("inside", ["file", "file/deeper"])
def test_an_output_folder_that_cannot_be_written(launch, tmp_path, inside):
    before = set(psutil.Process().children())
    (tmp_path / "file").write_text("not a folder")
    code, _, err = launch(f"output_dir={inside}")
    assert (code, err.count("\n")) == (2, 1)
    assert err.startswith(f"launch.py: output_dir={inside}: cannot be written (")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert set(psutil.Process().children()) <= before, "nothing was started"


def test_a_tracking_store_that_does_not_answer_costs_no_measurement_and_no_output(launch, tmp_path):
    request = ["gpus=0,1", "model=fmnist_cnn", "benchmark=exchange", "benchmark.iterations=3"]
    before = set(psutil.Process().children())
    code, out, err = launch(*request, "tracking.uri=http://127.0.0.1:9", f"output_dir={tmp_path}/o")
    assert (code, err) == (0, "")
    assert f"python -m launch sync {tmp_path}/o/default --uri http://127.0.0.1:9" in out
    (path,) = (tmp_path / "o" / "default").glob("*/record.json")
    record = records.read(path)
    assert (record.state, record.validity.verdict) == ("finished", "valid")
    assert set(psutil.Process().children()) <= before, "nothing was started"


def test_right_requests_are_planned_in_any_order_of_arguments(planned):
    """tests/golden/plans.txt has more."""
    cell = "resnet50 · nccl_allreduce · gpus 0,3"
    assert planned("nccl.p2p_level=0", "gpus=0,3", "-m") == [f"{cell} · P2P_LEVEL=LOC"]
    assert planned("gpus=0,3", "nccl.algo=^Tree") == [f"{cell} · ALGO=^Tree"]
    # One value for several choices of a group, of which the default one has no such option.
    for value in ("strategy.staging='sharded'", '++strategy.staging="sharded"'):
        several = planned("-m", "gpus=0,1", "strategy=cpu_staged,kvstore_local", value)
        assert len(several) == 2 and all(name.endswith(" · staging=sharded") for name in several)


def test_a_python_without_the_packages_is_named_in_one_sentence():
    done = subprocess.run([sys.executable, "-S", "launch.py"], cwd=ROOT, capture_output=True)
    assert done.returncode == 2 and done.stderr.count(b"\n") == 1
    assert b"this Python has no Hydra; activate the environment" in done.stderr


def test_help_reads_well_and_every_example_of_it_is_a_right_request(launch, planned):
    code, out, err = launch("--help")
    assert (code, err) == (0, "")
    assert out.startswith("Ringside measures")
    listed = out.split("Groups")[1].split("Options (")[0]
    for group, choices in CHOICES.items():
        assert f"{group}: {', '.join(choices)}" in " ".join(listed.split())
    assert "ringside" not in listed and "schema" not in listed
    assert max(map(len, out.splitlines())) <= 80
    assert "Exit status" in out
    examples = re.sub(r" \\\n\s+", " ", out.split("Examples")[1])
    lines = [line.strip() for line in examples.splitlines()]
    examples = [line for line in lines if line.startswith("python launch.py")]
    assert len(examples) == 11
    assert examples[1].startswith("python launch.py -m gpus=0,3 nccl.p2p_level=LOC")
    golden = (ROOT / "tests" / "golden" / "plans.txt").read_text("utf-8")
    for command in (line.split("  ")[0] for line in examples):
        if f"$ {command} topology=" not in golden:
            assert planned(*command.split()[2:])


def test_cfg_job_prints_every_option(launch):
    code, out, err = launch("--cfg", "job", "gpus=0,3", "nccl.p2p_level=LOC")
    assert (code, err) == (0, "")
    config = OmegaConf.create(out)
    assert list(config.gpus) == ["0", "3"]
    assert config.nccl.p2p_level == "LOC"
    assert set(FIELDS) < set(config.nccl)
    assert "hydra" not in config


@pytest.mark.parametrize("choice", [f"{group}={one}" for group in GROUPS for one in CHOICES[group]])
def test_every_choice_of_every_group_is_a_cell(hydra, choice):
    group, name = choice.split("=")
    overrides = [f"+{choice}" if group == "experiment" else choice]
    if choice == "benchmark=script":
        overrides.append(f"benchmark.run={ROOT}/launch.py")
    config, notices = checked(configuration(*overrides))
    if group in ("model", "strategy", "benchmark", "profiler"):
        found = getattr(config, group)
        assert (found["name"] if isinstance(found, dict) else found.name) == name
    assert notices == [] or choice == "nccl=sharp"  # whose SHARP_COLL_ENABLE_SAT no rule knows
    on_cpu = dataclasses.replace(config, optimize=config.on_cpu.get("optimize", config.optimize))
    for device, asked in (("cpu", on_cpu), ("cuda", config)):
        cell = resolve(asked, (0, 1), device)
        assert Cell.from_dict(cell.to_dict()) == cell
        assert cell.world_size == 2 and cell.batch_size >= cell.trains and cell.device == device


@pytest.mark.parametrize("name", CHOICES["experiment"])
def test_every_experiment_is_typed_in_its_file_and_its_plan_is_golden(name):
    command = f"python launch.py +experiment={name}"
    assert command in (ROOT / "conf" / "experiment" / f"{name}.yaml").read_text()
    assert f"$ {command} " in (ROOT / "tests" / "golden" / "plans.txt").read_text()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("gpus: 0", "gpus in FILE: Invalid value assigned: AnyNode is not a ListConfig, list or"),
        ("gpus: [each, scale]", "gpus=each,scale: the word each stands alone, not inside a subset"),
        ("gpus: [first]", "gpus=first: 'first' is not a GPU id, UUID, PCI bus id or word; write"),
        ("nccl: 7", "FILE: Merge error: int is not a subclass of Nccl. value: 7"),
        ("gpu: [0]", "gpu in FILE: unknown option; did you mean gpus?"),
        ("model: {cpu: {image: 8}}",
         "model.cpu.image in FILE: unknown option; expected one of: image_size, batch_size"),
        ("engine: {start: [1]}",
         "engine.start in FILE: Cannot convert 'ListConfig' to string: '[1]'; expected auto"),
        ("batch_size: many", "batch_size=many: expected auto or"),
        ("hydra: {sweeper: null}", "a YAML of --config-dir cannot be composed (Hydra: "),
        ("hydra:", "a YAML of --config-dir cannot be composed (Hydra: "),
        ("benchmark:", "benchmark=None: expected benchmark=NAME and benchmark.OPTION=value"),
        ("# @package [[[[", "a YAML of --config-dir cannot be composed (Hydra: "),
    ],
)  # fmt: skip
def test_a_wrong_study_file_is_one_sentence(launch, tmp_path, content, said):
    folder = tmp_path / "mine" / "experiment"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text(f"# @package _global_\n{content}\n")
    code, out, err = launch("--config-dir", str(folder.parent), "+experiment=mine", "dry_run=true")
    said = said.replace("FILE", "experiment/mine.yaml")
    assert (code, out) == (2, "") and err.startswith(f"launch.py: {said}") and err.count("\n") == 1


def test_an_option_of_a_group_that_a_study_file_empties_is_refused(launch, tmp_path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\nbenchmark:\n")
    code, _, err = launch(f"--config-dir={tmp_path}", "+experiment=mine", "benchmark.name=p2p")
    assert code == 2 and err.startswith("launch.py: benchmark.name=p2p: benchmark has no option")


def test_several_sizes_of_buckets_need_a_torch_that_has_them(launch, monkeypatch):
    monkeypatch.setattr("launch.plan.refusals.torch_version", lambda: "2.11.0+cu128")
    sentence = "launch.py: strategy.bucket_cap_mb=[1,25]: sizes of several buckets need torch 2.13"
    code, out, err = launch("strategy.bucket_cap_mb=[1,25]", "model=fmnist_cnn", "dry_run=true")
    assert (code, out) == (2, "") and err.startswith(sentence) and err.count("\n") == 1


@pytest.mark.parametrize(
    "typed", ["Müller (copy) #1/a=b", "~/it's here", "~", "/my studies/100%", "a;b&c"]
)
def test_a_path_needs_no_quotes_of_hydras(hydra, typed):
    asked = [f"output_dir={typed}", f"tracking.uri={typed}", "topology=null"]
    config = compose("config", normalise(asked))
    assert (config.output_dir, config.tracking.uri, config.topology) == (typed, typed, None)


def test_the_same_request_has_the_same_key_and_another_one_another(hydra):
    def key(*arguments):
        return composed_cell(*normalise(arguments), device="cpu").key

    own = key()
    for same in ("study=other", "batch_size=8", "precision=fp32", "nccl.p2p_level=null"):
        assert key(same) == own
    assert key("nccl.p2p_level=0") == key("nccl.p2p_level=LOC")
    changes = ("seed=1", "batch_size=4", "nccl.p2p_level=LOC", "strategy=none", "optimize=compile")
    assert len({own, *map(key, changes)}) == 6


def test_bytes_that_are_no_text_are_refused_by_the_command_itself(tmp_path):
    command = [sys.executable, str(ROOT / "launch.py"), b"study='\xff\xfe'"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("launch.py: study=") and done.stderr.count("\n") == 1


def test_a_current_folder_that_was_deleted_is_told(launch, tmp_path):
    (tmp_path / "gone").mkdir()
    os.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    said = "launch.py: the current folder was deleted; change to another one\n"
    assert launch("gpus=0") == (2, "", said)

"""Requests through launch.py itself: what is wrong is said in one line, before anything starts."""

import dataclasses
import importlib.util
import os
import shlex
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from benchmarks import record as records
from conf import schema
from conf.cell import Cell
from conf.command_line import GROUPS, normalise
from conf.nccl import FIELDS
from conf.resolve import checked, resolve

ROOT = Path(__file__).parent.parent
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
        assert "Traceback" not in err and "HYDRA_FULL_ERROR" not in err
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
    lines = (
        (ROOT / "tests" / "data" / "wrong_requests.txt").read_text(encoding="utf-8").splitlines()
    )
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
def test_multicast_against_the_environment_is_refused(refused, monkeypatch, name, value):
    for other, _ in FORBIDDING:
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(name, value)
    line = refused("nccl.nvls_enable=1")
    assert line.startswith(
        f"nccl.nvls_enable=1: the environment forbids NVLink multicast ({name}={value})"
    )


def test_multicast_without_such_an_environment_is_planned(planned, monkeypatch):
    for name, _ in FORBIDDING:
        monkeypatch.delenv(name, raising=False)
    assert len(planned("nccl.nvls_enable=1")) == 1


def test_a_library_that_is_not_installed_is_named_with_its_extra(refused, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == "timm" else find(name, *rest),
    )
    line = refused("model.library=timm")
    assert line.startswith("model.library=timm: not installed")
    assert "pip install '.[timm]'" in line


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
    request = [
        "gpus=0,1", "model=fmnist_cnn", "benchmark=exchange", "benchmark.iterations=3",
    ]  # fmt: skip
    before = set(psutil.Process().children())
    code, out, err = launch(*request, "tracking.uri=http://127.0.0.1:9", f"output_dir={tmp_path}/o")
    assert (code, err) == (0, "")
    assert f"python -m launch sync {tmp_path}/o/default --uri http://127.0.0.1:9" in out
    (path,) = (tmp_path / "o" / "default").glob("*/record.json")
    record = records.read(path)
    assert (record.state, record.validity.verdict) == ("finished", "valid")
    assert set(psutil.Process().children()) <= before, "nothing was started"


def test_right_requests_are_planned_in_any_order_of_arguments(planned):
    cell = "resnet50 · nccl_allreduce · gpus 0,3"
    assert planned("gpus=0,3") == planned("-m", "gpus=0,3") == planned("gpus=0,3", "-m") == [cell]
    assert planned("-m", "gpus=0,3", "nccl.p2p_level=LOC") == [f"{cell} · P2P_LEVEL=LOC"]
    assert planned("nccl.p2p_level=0", "gpus=0,3") == [f"{cell} · P2P_LEVEL=LOC"]
    assert planned("gpus=0,3", "nccl.algo=^Tree") == [f"{cell} · ALGO=^Tree"]
    assert len(planned("-m", "gpus=0+1,0+3", "strategy=nccl_allreduce,none")) == 4
    # One value for several choices of a group, of which the default one has no such option.
    for value in (
        "strategy.staging=sharded",
        "strategy.staging='sharded'",
        '++strategy.staging="sharded"',
    ):
        several = planned("-m", "gpus=0,1", "strategy=cpu_staged,kvstore_local", value)
        assert len(several) == 2 and all(name.endswith(" · staging=sharded") for name in several)
    assert planned("gpus=best:2", f"topology={ROOT}/tests/data/topo_dgx1_v100.txt") == [cell]
    assert planned("nccl.algo=Ring", "gpus=0") == ["resnet50 · nccl_allreduce · gpus 0 · ALGO=Ring"]


def test_help_reads_well(launch):
    code, out, err = launch("--help")
    assert (code, err) == (0, "")
    assert out.startswith("Ringside measures")
    listed = out.split("Groups")[1].split("Options (")[0]
    for group, choices in CHOICES.items():
        assert f"{group}: {', '.join(choices)}" in listed
    assert "ringside" not in listed and "schema" not in listed
    examples = [
        line.strip()
        for line in out.split("Examples")[1].splitlines()
        if line.strip().startswith("python launch.py")
    ]
    assert len(examples) == 11
    assert examples[1].startswith("python launch.py -m gpus=0,3 nccl.p2p_level=LOC")
    ours = out.replace(listed, "")  # that list is Hydra's, and grows with every choice
    assert max(map(len, ours.splitlines())) <= 130
    assert "Exit status" in out


def test_every_example_of_the_help_is_a_right_request(launch, planned):
    _, out, _ = launch("--help")
    for line in out.split("Examples")[1].splitlines():
        if line.strip().startswith("python launch.py"):
            assert planned(*line.strip().split("  ")[0].split()[2:])


def test_cfg_job_prints_every_option(launch):
    code, out, err = launch("--cfg", "job", "gpus=0,3", "nccl.p2p_level=LOC")
    assert (code, err) == (0, "")
    config = OmegaConf.create(out)
    assert list(config.gpus) == ["0", "3"]
    assert config.nccl.p2p_level == "LOC"
    assert set(FIELDS) < set(config.nccl)
    assert "hydra" not in config


@pytest.fixture(scope="module")
def hydra():
    GlobalHydra.instance().clear()
    schema.register()
    return str(ROOT / "conf")


@pytest.mark.parametrize(
    "choice", [f"{group}={choice}" for group in GROUPS for choice in CHOICES[group]]
)
def test_every_choice_of_every_group_is_a_cell(hydra, choice):
    prefix = "+" if choice.startswith("experiment=") else ""
    GlobalHydra.instance().clear()
    with initialize_config_dir(hydra, version_base="1.3"):
        config, notices = checked(
            OmegaConf.to_object(compose("config", overrides=[prefix + choice]))
        )
    group, name = choice.split("=")
    if group in ("model", "strategy", "benchmark", "profiler"):
        found = getattr(config, group)
        assert (found["name"] if isinstance(found, dict) else found.name) == name
    assert notices == [] or choice == "nccl=sharp"  # whose SHARP_COLL_ENABLE_SAT no rule knows
    for device in ("cpu", "cuda"):
        on_cpu = (
            {"optimize": config.on_cpu.get("optimize", config.optimize)} if device == "cpu" else {}
        )
        cell = resolve(dataclasses.replace(config, **on_cpu), (0, 1), device)
        assert Cell.from_dict(cell.to_dict()) == cell
        assert cell.world_size == 2 and cell.batch_size >= cell.trains and cell.device == device


@pytest.mark.parametrize("name", CHOICES["experiment"])
def test_every_experiment_plans_cells(launch, name):
    text = (ROOT / "conf" / "experiment" / f"{name}.yaml").read_text()
    assert f"python launch.py +experiment={name}" in text
    topology = f"topology={ROOT}/tests/data/topo_dgx1_v100.txt"
    code, out, err = launch(f"+experiment={name}", topology, "dry_run=true")
    assert (code, err) == (0, "") and " · gpus " in out
    assert "small form" not in out, "GPUs measure it in full"
    assert ("37 cells, " in out) == (name == "nccl_tuning")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("gpus: 0",
         "gpus in experiment/mine.yaml: Invalid value assigned: AnyNode is not a ListConfig, list or tuple; accepted is"),
        ("gpus: [each, scale]", "gpus=each,scale: the word each stands alone, not inside a subset; write"),
        ("gpus: [first]", "gpus=first: 'first' is no GPU id, UUID, PCI bus id or word; write"),
        ("nccl: 7", "experiment/mine.yaml: Merge error: int is not a subclass of Nccl. value: 7"),
        ("gpu: [0]", "gpu in experiment/mine.yaml: unknown; options here are model, data, strategy,"),
        ("model: {cpu: {image: 8}}", "model.cpu.image in experiment/mine.yaml: unknown; options here are image_size, batch_size"),
        ("engine: {start: [1]}",
         "engine.start in experiment/mine.yaml: Cannot convert 'ListConfig' to string: '[1]'; accepted is auto"),
        ("batch_size: many", "batch_size=many: accepted is auto or"),
    ],
)  # fmt: skip
def test_a_wrong_study_file_is_one_sentence(launch, tmp_path, content, said):
    (tmp_path / "mine" / "experiment").mkdir(parents=True)
    (tmp_path / "mine" / "experiment" / "mine.yaml").write_text(f"# @package _global_\n{content}\n")
    code, out, err = launch(
        "--config-dir", str(tmp_path / "mine"), "+experiment=mine", "dry_run=true"
    )
    assert (code, out) == (2, "") and err.startswith(f"launch.py: {said}") and err.count("\n") == 1


@pytest.mark.parametrize(
    "typed", ["Müller (copy) #1/a=b", "~/it's here", "~", "/my studies/100%", "a;b&c"]
)
def test_a_path_needs_no_quotes_of_hydras(hydra, typed):
    GlobalHydra.instance().clear()
    with initialize_config_dir(hydra, version_base="1.3"):
        config = compose(
            "config", normalise([f"output_dir={typed}", f"tracking.uri={typed}", "topology=null"])
        )
    assert (config.output_dir, config.tracking.uri, config.topology) == (typed, typed, None)


def test_the_same_request_has_the_same_key_and_another_one_another(hydra):
    def key(*arguments):
        config, _ = checked(OmegaConf.to_object(compose("config", overrides=normalise(arguments))))
        return resolve(config, (0, 1), "cpu").key

    GlobalHydra.instance().clear()
    with initialize_config_dir(hydra, version_base="1.3"):
        assert (
            key()
            == key("study=other")
            == key("batch_size=8")
            == key("precision=fp32")
            == key("nccl.p2p_level=null")
        )
        assert key("nccl.p2p_level=0") == key("nccl.p2p_level=LOC")
        others = [
            key(),
            key("seed=1"),
            key("batch_size=4"),
            key("nccl.p2p_level=LOC"),
            key("strategy=none"),
            key("optimize=compile"),
        ]
    assert len(set(others)) == len(others)


def command(*arguments, folder):
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [sys.executable, str(ROOT / "launch.py"), *arguments],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def test_the_command_itself_refuses_with_one_line(tmp_path):
    done = command("-m", "gpus=0,0", folder=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert (
        done.stderr.startswith("launch.py: gpus=0,0: GPU 0 is named twice")
        and done.stderr.count("\n") == 1
    )
    assert list(tmp_path.iterdir()) == []


def test_the_command_itself_refuses_bytes_that_are_no_text(tmp_path):
    done = command(b"study='\xff\xfe'", folder=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("launch.py: study=") and done.stderr.count("\n") == 1


def test_a_current_folder_that_was_deleted_is_told(launch, tmp_path):
    (tmp_path / "gone").mkdir()
    os.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert launch("gpus=0") == (
        2,
        "",
        "launch.py: the current folder was deleted; change to another one\n",
    )

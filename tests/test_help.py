"""What launch.py says of itself: the help of an option, and who may start it."""

import argparse
import importlib
import os
import re
import subprocess
import sys

import pytest
from build import ROOT

from analysis.__main__ import COMMANDS
from analysis.__main__ import main as analysis
from analysis.commands.advise_cells import COLUMNS as ADVICE
from analysis.commands.definitions import explained
from analysis.commands.predict_cells import FORECASTS, HELD_OUT
from conf import groups
from conf.command_line import GROUPS
from conf.options import Refused
from conf.schema import Config, Request
from launch.help import about_choice, option_rows
from launch.plan.refusals import refuse_nested, refuse_several_values

PYPROJECT = (ROOT / "pyproject.toml").read_text()


# --- an option, a group, a choice ----------------------------------------------------------------


def test_every_option_and_every_choice_has_a_meaning():
    assert [row[0] for row in option_rows(Config, "") if not row[1]] == []
    for group in GROUPS:
        for name in groups.choices(group):
            assert about_choice(group, name), f"{group}={name}"
    for group in groups.WITH_RULES:
        for path in groups.files(group).values():
            options = groups.choice(group, path.stem).options
            commented = re.findall(r"^(\w+):[^#\n]*\s#\s+.+$", path.read_text(), re.MULTILINE)
            assert set(options) - {"name"} <= set(commented), path


TOPICS = {
    "nccl.p2p_level": "nccl.p2p_level maximum distance between two GPUs for direct access; "
    "LOC: never LOC, NVL, PIX, PXB, PHB or SYS null",
    "strategy=cpu_staged": "transport shared: pinned shared memory; gloo: the naive",
    "+experiment": "scaling Weak scaling: 1, 2, 4, … all devices",
    "strategy.transport": "strategy=cpu_staged shared: pinned shared memory; gloo: the naive",
    "engine": "a list, [one,two]",
    "optimizer": "sgd or adamw",
    "cpu_staged": "strategy=cpu_staged: Gradients to pinned host memory",
    "batch_size": "per rank and step (weak scaling)",
    "gpus": "worst_order:4",
    "nodes": "the first 1, 2, 4, … hosts, and all",
    "inconclusive": "INCONCLUSIVE (in python -m analysis compare): these runs cannot show a slowdown of --limit",
    "server_link": "all ranks copy to the server's GPU at once",
}


@pytest.mark.parametrize("topic", TOPICS)
def test_a_topic_is_explained(launch, monkeypatch, topic):
    monkeypatch.setenv("COLUMNS", "200")
    code, out, err = launch("-h", topic)
    assert (code, err) == (0, "") and TOPICS[topic] in " ".join(out.split())


@pytest.mark.parametrize("column", (*FORECASTS, *HELD_OUT, *ADVICE), ids=lambda it: it.heading)
def test_a_column_of_a_forecast_is_explained(column):
    assert explained(column.heading)


def test_an_unknown_topic_is_refused(launch):
    assert launch("--config-dir", ".", "-h", "strategy=none")[0] == 0  # a folder is no topic
    code, _, err = launch("-h", "nccl.p2p_levle")
    assert code == 2 and "nccl.p2p_level, " in err
    assert err.startswith("launch.py: -h nccl.p2p_levle: unknown name")


def test_an_option_that_a_command_of_analysis_lacks_shows_the_options_that_it_has(capsys):
    with pytest.raises(SystemExit):
        analysis(["nccl-log", "a.log", "--without", "b.log"])
    assert "usage: python -m analysis nccl-log [-h] [--json]" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        analysis(["advise"])
    said = "required: STUDY; an example: python -m analysis advise outputs/default --gpus 0+1,0+3"
    assert f"{said}\n" in capsys.readouterr().err


def test_the_help_of_analysis_has_groups_and_examples_that_are_right(capsys):
    with pytest.raises(SystemExit):
        analysis(["--help"])
    said = capsys.readouterr().out
    for title, commands in COMMANDS.items():
        assert f"\n{title}\n" in said
        for command in commands:
            line = f"python -m analysis {command.name} {command.example}"
            assert line in said and f"{command.name:<11} {command.summary}\n" in said
            parser = argparse.ArgumentParser(prog=f"python -m analysis {command.name}")
            parser.set_defaults(command=command.name)
            importlib.import_module(f"analysis.commands.{command.module}").configure(parser)
            parser.parse_args(command.example.split())


def test_words_that_ask_for_help_are_answered(launch):
    whole = launch("--help")
    assert launch("help") == whole and launch("-v") == launch("--version")
    for word in ("--list", "--examples"):
        code, out, err = launch(word)
        assert (code, err) == (0, "")
        assert all(section in whole[1] for section in out.split("\n\n"))


def test_hydras_own_completion_is_at_hand(launch):
    assert "hydra_bash_completion" in launch("-sc", "install=bash")[1]


# --- the batch script ----------------------------------------------------------------------------


def test_the_batch_script_starts_launch_py_in_the_clone_with_its_arguments(tmp_path):
    script = ROOT / "launch" / "recipes" / "slurm.sh"
    of_the_job = {"SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_ID": "7", "SLURM_PROCID": "0"}
    environment = os.environ | of_the_job | {"SLURM_NTASKS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment["RINGSIDE_PYTHON"] = sys.executable
    done = subprocess.run(
        ["bash", str(script), "gpus=0,1", "model=fmnist_cnn", "dry_run=true"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert "1  fmnist_cnn · nccl_allreduce · gpus 0,1" in done.stdout


def test_the_recipes_build_on_one_image_whose_torch_is_new_enough():
    folder = ROOT / "launch" / "recipes"
    texts = [(folder / name).read_text() for name in ("Dockerfile", "ringside.def")]
    for text in (*texts, (folder / "trainjob.yaml").read_text()):
        assert "/ringside/launch.py" in text, "the image starts in a folder of its own"
    images = [re.search(r"^(?:FROM|From:) (\S+)$", text, re.MULTILINE)[1] for text in texts]
    assert images[0] == images[1]
    of_image = re.search(r":(\d+)\.(\d+)", images[0])
    least = re.search(r"torch>=(\d+)\.(\d+)", PYPROJECT)
    assert tuple(map(int, of_image.groups())) >= tuple(map(int, least.groups()))


# --- who may start it ----------------------------------------------------------------------------


SEVERAL = {
    "RANK=3 LOCAL_RANK=3 WORLD_SIZE=8": "launch.py was started by torchrun",
    "RANK=0 LOCAL_RANK=0 WORLD_SIZE=1": "RANK=0, LOCAL_RANK=0, WORLD_SIZE=1: ",
    "SLURM_PROCID=7 SLURM_NTASKS=8": "by srun, .*, or with srun --ntasks=1",
    "SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=8": "SLURM_STEP_NUM_TASKS=8: launch.py was",
    "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2": "by mpirun",
    "PMI_RANK=0 PMI_SIZE=2": "by mpiexec",
}
ALONE = [
    "SLURM_PROCID=0 SLURM_NTASKS=8 SLURM_JOB_ID=1",  # a batch script that asked for eight tasks
    "SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=1",  # srun --ntasks=1
    "OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=1",
    "WORLD_SIZE=8 RANK=0 MASTER_ADDR=a",  # a pod of a training operator
    "SLURM_PROCID= PMI_RANK=no-number",
]


def variables(text):
    return dict(word.split("=") for word in text.split())


@pytest.mark.parametrize("around", SEVERAL)
def test_a_program_that_starts_several_is_named(around):
    with pytest.raises(Refused, match=SEVERAL[around]):
        refuse_nested(variables(around))


@pytest.mark.parametrize("around", ALONE)
def test_one_process_may_launch(around):
    refuse_nested(variables(around))


def test_torchrun_is_refused_by_the_command(launch, monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "1")
    code, out, err = launch("gpus=0", "dry_run=true")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "launch.py was started by torchrun" in err and os.listdir() == []  # noqa: PTH208


# --- refusals show what was typed ----------------------------------------------------------------


def test_a_sweep_over_what_cells_share_is_refused_as_typed():
    one, two = Config(), Config()
    two.validity.noise_limit = 0.2
    limit = "validity.noise_limit"
    with pytest.raises(Refused, match=f"^{limit}=0.1,0.2: {limit} takes one value; run one"):
        refuse_several_values([Request(one, [f"{limit}=0.1"]), Request(two, [f"{limit}=0.2"])])
    two.tracking.enabled = False
    with pytest.raises(Refused, match=r"^tracking=mlflow,none: tracking takes one"):
        refuse_several_values([Request(one, ["tracking=mlflow"]), Request(two, ["tracking=none"])])
    with pytest.raises(Refused, match=r"^tracking.enabled=True,False: tracking.enabled takes"):
        refuse_several_values([Request(one, []), Request(two, [])])  # from a study's file
    refuse_several_values([Request(one, ["seed=1"]), Request(one, ["seed=2"])])


@pytest.mark.parametrize("command", ["launch.py --help", "-m analysis topology topo_dgx1_v100.txt"])
def test_a_reader_that_leaves_early_gets_no_traceback(command):
    """As in `python launch.py --help | head -1`."""
    reading, writing = os.pipe()
    os.close(reading)
    command = command.replace("launch.py", f"{ROOT}/launch.py")
    words = [sys.executable, *command.replace("topo_", f"{ROOT}/tests/data/topo_").split()]
    done = subprocess.run(words, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")

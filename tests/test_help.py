"""What launch.py says of itself: the help of an option, what the TAB key completes, who may start it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from analysis.topology.source import load_topology
from conf import groups
from conf.command_line import GROUPS
from conf.options import Refused
from conf.schema import Config
from launch.help import completion
from launch.help.completion import completions
from launch.help.examples import described, examples
from launch.help.options import about_choice, options, options_of
from launch.machine import devices
from launch.machine.devices import refuse_several
from launch.plan.shared_options import refuse_several_values

ROOT = Path(__file__).parent.parent
PYPROJECT = (ROOT / "pyproject.toml").read_text()
DGX1 = str(ROOT / "tests" / "data" / "topo_dgx1_v100.txt")


# --- an option, a group, a choice ---------------------------------------------------------------------------------


def test_every_option_and_every_choice_has_a_meaning():
    of_files = [
        one
        for group in groups.WITH_RULES
        for name in groups.choices(group)
        for one in options_of(group, name)
    ]
    assert [one.key for one in (*options({}), *of_files) if not one.meaning] == []
    assert [
        f"{group}={name}"
        for group in GROUPS
        for name in groups.choices(group)
        if not about_choice(group, name)
    ] == []


def explained(launch, topic):
    return [" ".join(line.split()) for line in launch("-h", topic)[1].splitlines()]


def test_an_option_has_its_meaning_what_it_accepts_and_its_default(launch, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    code, out, err = launch("-h", "nccl.p2p_level", "strategy=cpu_staged", "+experiment=scaling")
    assert (code, err) == (0, "")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert (
        "nccl.p2p_level maximum distance between two GPUs for direct access; LOC: never LOC, NVL, PIX, PXB, PHB or SYS null"
        in lines
    )
    assert "strategy.transport shared: pinned shared memory; gloo: the naive reference, through the network stack " \
        "shared or gloo shared" in lines  # fmt: skip
    assert "null: Ringside leaves the variable as it is" in lines
    assert any("a list, [one,two]" in line for line in explained(launch, "engine"))
    assert any(
        line.startswith("optimizer.name ") and "sgd or adamw" in line
        for line in explained(launch, "optimizer")
    )
    assert any(line.startswith("scaling Weak scaling: 1, 2, 4, … all devices") for line in lines)
    assert not any(line.startswith("kvstore_local") for line in lines)


def test_a_typed_option_is_explained_and_an_unknown_one_refused(launch):
    code, out, _ = launch("-m", "gpus=0,3", "batch_size=8,16", "--help")
    assert code == 0 and "worst_order:4" in out and "per rank and step (weak scaling)" in out
    assert launch("--config-dir", ".", "-h", "strategy=none")[0] == 0  # a folder is no topic
    code, _, err = launch("-h", "nccl.p2p_levle")
    assert (
        code == 2
        and err.startswith("launch.py: -h nccl.p2p_levle: no group or option")
        and "nccl.p2p_level?" in err
    )


@pytest.mark.parametrize("arguments", [["--info", "gpus=0"], ["gpus=0", "-i", "searchpath"]])
def test_info_needs_no_value_and_takes_no_override_for_one(arguments):
    command = [
        sys.executable,
        ROOT / "launch.py",
        *arguments,
    ]  # Hydra logs to the standard output that it first saw
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "") and "Config search path" in done.stdout


# --- the TAB key --------------------------------------------------------------------------------------------------


def test_gpus_completes_ids_and_words(monkeypatch):
    four = devices.Machine("cuda", (), (0, 1, 2, 3), 8)
    monkeypatch.setattr(completion, "look", lambda asked, surrounding: four)
    words = [
        "advise:2",
        "all",
        "best:2",
        "classes",
        "classes:2",
        "each",
        "pairs",
        "scale",
        "worst:2",
        "worst_order:4",
    ]
    assert completions("gpus=") == [f"gpus={text}" for text in ["0", "1", "2", "3", *words]]
    assert completions("-m gpus=0,2,") == ["gpus=0,2,1", "gpus=0,2,3"]
    assert completions("-m gpus=0+1,2+") == ["gpus=0+1,2+3"]
    assert completions("gpus=wor") == ["gpus=worst:2", "gpus=worst_order:4"]


def test_values_and_lists_of_values_are_completed(tmp_path):
    assert completions("nccl.p2p_level=") == [
        f"nccl.p2p_level={word}" for word in ("LOC", "NVL", "PHB", "PIX", "PXB", "SYS")
    ]
    assert completions("-m nccl.p2p_level=LOC,P") == [
        f"nccl.p2p_level=LOC,{word}" for word in ("PHB", "PIX", "PXB")
    ]
    assert completions("nccl.p2p_disable=") == ["nccl.p2p_disable=0", "nccl.p2p_disable=1"]
    assert completions("-m model=resnet50,vg") == ["model=resnet50,vgg16"]
    assert completions("waterfall=") == ["waterfall=false", "waterfall=true"]
    assert completions("+experiment=st") == ["+experiment=strategies", "+experiment=strong_scaling"]
    assert completions("report=o") == ["report=open"]
    assert completions("seed=") == []  # a number: the shell offers nothing
    (tmp_path / "strategy").mkdir()
    (tmp_path / "strategy" / "mine.yaml").write_text("name: mine\n_target_: mine.Mine\n")
    assert completions(f"--config-dir {tmp_path} strategy=m") == ["strategy=mine"]


def test_keys_are_completed_part_by_part_with_the_options_of_the_chosen_files():
    assert completions("prec") == ["precision="]
    assert completions("opt") == ["optimize=", "optimizer."]
    assert completions("strategy=cpu_staged strategy.s") == ["strategy.staging="]
    assert completions("strategy.s") == ["strategy.static_graph="]
    assert completions("+") == ["+experiment="]
    assert {"gpus=", "model=", "nccl.", "+experiment="} <= set(completions(""))
    assert "--help" in completions("gpus=0 --h")


# (shell, how it reads the script, how a person's line becomes what the shell completes)
BASH = r"""COMP_LINE="$1" COMP_POINT=${#1}
IFS=' '; read -ra words <<< "${1//=/ = }"; COMP_WORDS=("${words[@]}")
_ringside; printf '%s\n' "${COMPREPLY[@]}"
"""


@pytest.mark.parametrize("shell", ["bash", pytest.param("fish", marks=pytest.mark.needs("fish"))])
def test_the_script_for_a_shell_asks_the_program_that_is_typed(shell, tmp_path):
    line = f"{sys.executable} {ROOT}/launch.py -m nccl.p2p_level=LOC,P"
    if shell == "bash":
        script = [f"{completion.BASH}\n{BASH}", "bash", line]
        expected = ["LOC,PHB", "LOC,PIX", "LOC,PXB"]  # bash ends words at `=`
    else:
        script = [f"{completion.FISH}\ncomplete -C '{line}'"]
        expected = [f"nccl.p2p_level=LOC,{word}" for word in ("PHB", "PIX", "PXB")]
    done = subprocess.run(
        [shell, "-c", *script], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split() == expected, done.stderr


def test_hydras_option_prints_the_scripts(launch):
    assert (
        launch("-sc", "install=bash")[1].strip()
        == launch("-sc", "install=zsh")[1].strip()
        == completion.BASH
    )
    assert launch("-sc", "install=fish")[1].strip() == completion.FISH


# --- commands to begin with ---------------------------------------------------------------------------------------


def planned(launch, arguments, *more):
    """The cells of a command's plan."""
    code, out, err = launch(*arguments.split(), *more, "dry_run=true")
    assert (code, err) == (0, ""), arguments
    return [line for line in out.splitlines() if line.split()[0].isdigit() and "·" in line]


def test_the_examples_of_this_machine_are_right_requests(launch):
    code, out, err = launch("examples")
    commands = [
        line.strip() for line in out.splitlines() if line.startswith("    python launch.py ")
    ]
    assert (code, err, len(commands)) == (0, "", 5)
    assert out.startswith("No GPU is used here: ")
    for command in commands:
        assert planned(launch, command.removeprefix("python launch.py "))


def gpus(number):
    return devices.Machine(
        "cuda",
        tuple(devices.Device(one, name="V100") for one in range(number)),
        tuple(range(number)),
        40,
    )


def test_the_examples_of_a_dgx1_name_its_best_pair_and_its_links(launch):
    listed = examples(gpus(8), load_topology(DGX1))
    assert len(listed) == 5
    assert (
        "How fast is each kind of link between two GPUs?",
        "-m gpus=classes:2 benchmark=p2p",
    ) in listed
    for _, arguments in listed:
        assert planned(launch, arguments, f"topology={DGX1}")
    assert any("gpus=0,3 nccl.p2p_level=null,LOC" in arguments for _, arguments in listed)
    assert (
        described(gpus(8), load_topology(DGX1))
        == "This machine has 8 × V100, joined by NV2+NV1+SYS."
    )


def test_the_examples_of_one_gpu_are_right_requests(launch, tmp_path):
    alone = tmp_path / "topology.txt"
    alone.write_text("\tGPU0\tCPU Affinity\tNUMA Affinity\nGPU0\t X \t0-19\t0\n")
    listed = examples(gpus(1), load_topology(str(alone)))
    assert len(listed) == 5
    for _, arguments in listed:
        assert planned(launch, arguments, f"topology={alone}")
    assert described(gpus(1), None) == "This machine has 1 × V100."


# --- the batch script ---------------------------------------------------------------------------------------------


def test_the_batch_script_starts_launch_py_in_the_clone_with_its_arguments(tmp_path):
    script = ROOT / "launch" / "recipes" / "slurm.sh"
    of_the_job = {
        "SLURM_SUBMIT_DIR": str(ROOT),
        "SLURM_JOB_ID": "7",
        "SLURM_PROCID": "0",
        "SLURM_NTASKS": "1",
    }
    environment = {
        **os.environ,
        **of_the_job,
        "RINGSIDE_PYTHON": sys.executable,
        "CUDA_VISIBLE_DEVICES": "",
    }
    done = subprocess.run(
        ["bash", str(script), "gpus=0,1", "model=fmnist_cnn", "dry_run=true"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert "1  fmnist_cnn · nccl_allreduce · gpus 0,1" in done.stdout


def test_the_recipes_build_on_one_image_whose_torch_is_new_enough():
    folder = ROOT / "launch" / "recipes"
    texts = [(folder / name).read_text() for name in ("Dockerfile", "ringside.def")]
    images = [re.search(r"^(?:FROM|From:) (\S+)$", text, re.MULTILINE)[1] for text in texts]
    assert images[0] == images[1]
    of_image, least = (
        re.search(r":(\d+)\.(\d+)", images[0]),
        re.search(r"torch>=(\d+)\.(\d+)", PYPROJECT),
    )
    assert tuple(map(int, of_image.groups())) >= tuple(map(int, least.groups()))


# --- who may start it ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"RANK": "3", "LOCAL_RANK": "3", "WORLD_SIZE": "8"}, "launch.py was started by torchrun"),
        (
            {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"},
            "RANK=0, LOCAL_RANK=0, WORLD_SIZE=1: launch.py was",
        ),
        (
            {"SLURM_PROCID": "7", "SLURM_NTASKS": "8"},
            "SLURM_PROCID=7: .* by srun, .* without srun, or with srun --ntasks=1",
        ),
        (
            {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "8"},
            "SLURM_STEP_NUM_TASKS=8: launch.py was started by srun",
        ),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, "by mpirun"),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, "by mpiexec"),
    ],
)
def test_a_program_that_starts_several_is_named(environment, said):
    with pytest.raises(Refused, match=said):
        refuse_several(environment)


@pytest.mark.parametrize(
    "environment",
    [
        {
            "SLURM_PROCID": "0",
            "SLURM_NTASKS": "8",
            "SLURM_JOB_ID": "1",
        },  # a batch script that asked for eight tasks
        {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},  # srun --ntasks=1
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
        {"WORLD_SIZE": "8", "RANK": "0", "MASTER_ADDR": "a"},  # a pod of a training operator
        {"SLURM_PROCID": "", "PMI_RANK": "no number"},
    ],
)
def test_one_process_may_launch(environment):
    refuse_several(environment)


def test_torchrun_is_refused_by_the_command(launch, monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "1")
    code, out, err = launch("gpus=0", "dry_run=true")
    assert (
        (code, out) == (2, "")
        and "launch.py was started by torchrun" in err
        and err.count("\n") == 1
    )
    assert os.listdir() == []  # noqa: PTH208


# --- refusals show what was typed ---------------------------------------------------------------------------------


def test_a_sweep_over_what_cells_share_is_refused_as_typed():
    one, two = Config(), Config()
    two.validity.noise_limit = 0.2
    said = (
        "validity.noise_limit=0.1,0.2: a sweep has one validity.noise_limit; run one sweep for each"
    )
    with pytest.raises(Refused, match=f"^{said}$"):
        refuse_several_values(
            [one, two], [["validity.noise_limit=0.1"], ["validity.noise_limit=0.2"]]
        )
    two.tracking.enabled = False
    with pytest.raises(Refused, match=r"^tracking=mlflow,none: a sweep has one tracking"):
        refuse_several_values([one, two], [["tracking=mlflow"], ["tracking=none"]])
    with pytest.raises(
        Refused, match=r"^tracking.enabled=True,False: a sweep has one tracking.enabled"
    ):
        refuse_several_values([one, two], [[], []])  # from a study's file
    refuse_several_values([one, one], [["seed=1"], ["seed=2"]])


@pytest.mark.parametrize(
    "command", ["launch.py --help", "launch.py examples", "-m analysis topology topo_dgx1_v100.txt"]
)
def test_a_reader_that_leaves_early_gets_no_traceback(command):
    """As in `python launch.py --help | head -1`."""
    reading, writing = os.pipe()
    os.close(reading)
    words = (
        command.replace("launch.py", f"{ROOT}/launch.py")
        .replace("topo_", f"{ROOT}/tests/data/topo_")
        .split()
    )
    done = subprocess.run(
        [sys.executable, *words], stdout=writing, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")

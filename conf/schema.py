"""The typed schema: every option of a study, with its unit. The YAML files of the groups fill it;
the command line overrides it.

The options of a strategy, a benchmark or a profiler stand in its own YAML
(`conf/strategy/NAME.yaml`), with the values that each accepts. conf.groups checks them.
"""

# ruff: noqa: RUF009 (option() makes a dataclass field, not a value)

import functools
from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, OmegaConf

from conf.cell import GRAPHED, IMAGES, MOST_CONNECTIONS, SAMPLES
from conf.nccl import Nccl
from conf.options import option
from conf.question import QUESTIONS, RATES

PRECISIONS = ("auto", "fp32", "tf32", "bf16", "fp16", "bf16_weights")
UNGRAPHED = ("auto", "eager", "compile", "max")


@dataclass
class Sizes:
    """The image size and the batch size that `auto` means for a model on one kind of device."""

    image_size: int | None = option(None, "pixels per side of an image", least=8, most=4096)
    batch_size: int = option(MISSING, "images or samples per rank and step", least=1, most=1 << 20)


@dataclass
class Model:
    """The network that is trained. `library` and `builder` say who builds it."""

    name: str = MISSING
    library: str = option(
        MISSING,
        "what builds the model; python: a module of yours",
        words=("torchvision", "timm", "ringside", "python"),
    )
    builder: str = option(
        MISSING,
        "the name that its library has; library=python: your function, my_package.my_module:build",
    )
    inputs: str = option(
        IMAGES,
        "what it trains on; samples: your own model makes its batches (trainers/OWN.md)",
        words=(IMAGES, SAMPLES),
    )
    channels: int = option(3, "channels of an image", least=1, most=64)
    classes: int = option(1000, "classes of the last layer", least=2, most=1 << 20)
    auxiliary_weight: float = option(
        0.0, "weight in the loss of each auxiliary head", least=0, most=1
    )
    least_image_size: int = option(
        32, "smallest image that its layers accept, pixels of a side", least=1, most=4096
    )
    most_image_size: int = option(4096, "largest image that its layers accept", least=1, most=4096)
    gpu: Sizes = field(default_factory=Sizes)
    cpu: Sizes = field(default_factory=Sizes)
    gigaflop: float | None = option(
        None,
        "10⁹ floating-point operations of the forward pass of one image of gpu.image_size, for "
        "estimates",
        least=0,
    )
    options: dict[str, Any] = option({}, "further arguments of the builder")


@dataclass
class Data:
    """Where batches come from. Without a loader they are synthetic, and on the device before the
    clock starts."""

    name: str = "synthetic"
    loader: str | None = option(
        None, "a function of your own that returns batches, my_module:load (trainers/OWN.md)"
    )
    options: dict[str, Any] = option({}, "further arguments of that function")


@dataclass
class OptimizerOptions:
    """How gradients become new weights. Without `auto`: conf.cell.Optimizer."""

    name: str = option("sgd", "sgd (with momentum) or adamw", words=("sgd", "adamw"))
    learning_rate: Any = option(
        "auto", "step size; auto: 0.01, adamw 0.001", least=0, most=100, auto=True
    )
    weight_decay: Any = option(
        "auto", "L2 penalty; auto: 5e-5, adamw 0.01", least=0, most=1, auto=True
    )
    momentum: Any = option("auto", "momentum of sgd; auto: 0.9", least=0, most=1, auto=True)
    beta1: Any = option(
        "auto", "of adamw: decay of the mean gradient; auto: 0.9", least=0, most=0.999999, auto=True
    )
    beta2: Any = option(
        "auto", "of adamw: decay of the mean square; auto: 0.999", least=0, most=0.999999, auto=True
    )
    epsilon: Any = option(
        "auto",
        "of adamw: added to the root of the mean square; auto: 1e-8",
        least=1e-15,
        most=1,
        auto=True,
    )


@dataclass
class Tracking:
    """Where records are projected to."""

    enabled: bool = option(
        True, "false: records only; python -m launch sync STUDY writes them to MLflow later"
    )
    uri: str | None = option(None, "MLflow tracking URI; null: sqlite:///<output_dir>/mlflow.db")
    experiment: str | None = option(None, "MLflow experiment; null: ringside/<study>")


@dataclass
class Engine:
    """How ranks start, and how long they may take."""

    name: str = option(
        "local",
        "what starts an agent on each host; local: this machine only",
        words=("local", "ssh", "slurm", "command", "env"),
    )
    prefix: list[str] = option(
        [], "of engine=command: the words before the agent's command; {host} is the host's name"
    )
    interface: str | None = option(
        None,
        "network interface of gloo and NCCL on every host; null: the one that reaches the first "
        "host",
    )
    trusted_network: bool = option(
        False,
        "true: hosts may connect at a public address, one that is routed to the whole internet; "
        "what they send is not encrypted",
    )
    ssh_config: str | None = option(
        None, "of engine=ssh: a configuration file in place of ~/.ssh/config, as ssh -F"
    )
    token_file: str | None = option(
        None,
        "of engine=env: a file with a secret that all nodes of the job have; null: the variable "
        "RINGSIDE_JOB_TOKEN",
    )
    python: str | None = option(None, "the Python of the other hosts; null: the path of this one")
    folder: str | None = option(
        None, "the folder of Ringside on the other hosts; null: the path of this one"
    )
    lost_after_s: float = option(
        15.0, "seconds without a sign of life before a host is lost", least=3
    )
    start: str = option(
        "auto",
        "how ranks start; auto: forked from an agent that has imported torch, where possible; "
        "exec: as new programs",
        words=("auto", "exec"),
    )
    start_timeout_s: float = option(300.0, "seconds until every rank must have reported", least=1)
    silence_timeout_s: float = option(
        180.0, "seconds without a sign of life before a rank counts as hung", least=1
    )
    cell_timeout_s: float = option(1800.0, "seconds that a whole run may take", least=1)
    stop_grace_s: float = option(
        5.0, "seconds between asking a rank to stop and killing it", least=0
    )
    submit: bool = option(
        False,
        "of engine=slurm: submit the whole command as a job and print its id (needs submitit)",
    )
    time_minutes: int = option(60, "minutes that the submitted job may take", least=1, most=1 << 20)
    partition: str | None = option(None, "partition of the submitted job; null: Slurm's default")
    account: str | None = option(None, "account of the submitted job; null: Slurm's default")
    job_nodes: int | None = option(
        None, "hosts of the submitted job; null: as many as nodes= names", least=1, most=4096
    )
    gpus_per_node: int | None = option(
        None, "GPUs of each host of the submitted job; null: none", least=1, most=64
    )
    container: str | None = option(
        None,
        "of engine=slurm: the image in which agents run (srun --container-image, by pyxis); "
        "engine.python is the Python in it",
    )
    container_mounts: list[str] = option(
        [], "of engine=slurm: further mounts of engine.container, as HOST:CONTAINER"
    )
    sbatch: dict[str, Any] = option(
        {}, "further options of sbatch by their long names, as in +engine.sbatch.qos=high"
    )


@dataclass
class ValidityLimits:
    """Limits of the validity checks."""

    noise_limit: float = option(
        0.05,
        "half-width of the 95 % interval within a run, as a share, above which its rate is noisy",
        least=0,
    )
    change_limit: float = option(
        0.01,
        "share by which the step time may change while it is timed; on CPU workers noise_limit",
        least=0,
    )
    pause_limit: float = option(
        0.0025,
        "share of the time that pauses inside steps may take; 3 times that on CPU workers",
        least=0,
        most=1,
    )
    slow_rank_limit: float = option(
        0.03, "share by which a rank may compute slower than the others", least=0
    )
    clock_limit: float = option(0.005, "share by which GPU and host clocks may differ", least=0)
    idle_limit: float = option(
        0.1, "share of a step that a GPU may idle because the CPU is late", least=0, most=1
    )
    foreign_memory_gib: float = option(
        2.0, "GiB that others may hold on a GPU before a run starts", least=0
    )
    foreign_busy_percent: float = option(
        10.0, "percent that a GPU may be busy before a run starts", least=0, most=100
    )
    foreign_growth_gib: float = option(
        0.3, "GiB by which memory that is not the run's may grow while steps are timed", least=0
    )
    foreign_busy_share: float = option(
        0.05,
        "share of the timed windows in which GPUs may be busy beyond what these steps need if no "
        "GPU waits for its CPU",
        least=0,
        most=1,
    )
    foreign_cpu_limit: float = option(
        0.1, "share of a run's cores that other programs may use while it measures", least=0, most=1
    )
    clock_change_limit: float = option(
        0.01, "share by which the SM clock may differ from that of the run's baseline", least=0
    )
    clock_spread_limit: float = option(
        0.05,
        "share by which SM clocks may differ between the GPUs of a run, or between its phases",
        least=0,
    )
    strict: bool = option(False, "an invalid run is a failed one: exit status 1")


@dataclass
class Config:
    """One cell before its GPU subset is resolved, and how its sweep runs."""

    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    strategy: Any = MISSING
    benchmark: Any = MISSING
    nccl: Nccl = field(default_factory=Nccl)
    optimizer: OptimizerOptions = field(default_factory=OptimizerOptions)
    profiler: Any = MISSING
    tracking: Tracking = field(default_factory=Tracking)
    engine: Engine = field(default_factory=Engine)
    validity: ValidityLimits = field(default_factory=ValidityLimits)

    nodes: list[str] = option(
        [], "one set of hosts, a,b; several sets: a+b,a+c; or a word above; empty: this machine"
    )
    hosts: str | None = option(
        None, "a file of hosts, one a line, as MXNet's -H; null: those that nodes= names"
    )
    gpus: list[str] = option(
        ["all"], "one subset, 0,3, the same on every host; several: 0+1,0+3; or a word above"
    )
    topology: str | None = option(
        None, "a file with the machine's topology; null: read it from the driver"
    )
    second_member: bool = option(
        False, "gpus=classes: one more member of each class, to test that its members are equal"
    )
    sample_gpus: bool = option(
        True,
        "read clocks, power, throttling and foreign load of the GPUs and the CPU, twice a second",
    )
    tuning_pass: Any = option(
        "auto",
        "log NCCL's choices in an untimed pass; auto: where only they show what a setting did",
        words=("auto", "True", "False"),
    )
    device: str = option("auto", "what a rank runs on", words=("auto", "cpu", "cuda"))
    batch_size: Any = option(
        "auto",
        "images or samples per rank and step (weak scaling), or per micro-step with accumulate; "
        "auto: that of the model",
        least=1,
        most=1 << 20,
        auto=True,
        whole=True,
    )
    accumulate: int = option(
        1,
        "micro-steps (forward and backward) per step; gradients are exchanged in the last one only",
        least=1,
        most=1024,
    )
    global_batch_size: int | str | None = option(
        None,
        "images or samples per step over all ranks (strong scaling); auto: what one GPU holds, "
        "divisible by 2, 4, … and the number of GPUs",
        least=1,
        most=1 << 30,
        auto=True,
        whole=True,
    )
    image_size: Any = option(
        "auto",
        "pixels per side of an image; auto: as conf/model/ has it, of a function of yours 224 on "
        "GPUs and 64 on CPU workers",
        least=8,
        most=4096,
        auto=True,
        whole=True,
    )
    precision: str = option(
        "auto",
        "number format of the computation; bf16, fp16: autocast, weights stay fp32; bf16_weights: "
        "weights too; auto: bf16 on a GPU, fp32 on a CPU",
        words=PRECISIONS,
    )
    optimize: str = option(
        "auto",
        "how steps are made fast. compile: torch.compile; max: that, and Ringside's changes to "
        "the model's code; graph: each step replays a CUDA graph; compile_graph, max_graph: both; "
        "auto: eager",
        words=(*UNGRAPHED, *GRAPHED),
    )
    channels_last: Any = option(
        "auto", "NHWC tensors; auto: on a GPU", words=("auto", "True", "False")
    )
    cuda_device_max_connections: int | None = option(
        None,
        "CUDA_DEVICE_MAX_CONNECTIONS, the number of hardware queues of a process. Streams that "
        "share one wait for each other, which can change the time of a step; null: the value of "
        "your environment (unset: 8)",
        least=1,
        most=MOST_CONNECTIONS,
    )
    seed: int = option(0, "seed of weights, batches and order of repeats", least=0, most=1 << 31)

    study: str = option("default", "the name of the study: its records are read together")
    intro: str = option("", "of a named study: the words before the number of its runs")
    health: bool = option(
        False,
        "say at the end which devices are slower than the others: exit status 1 if any is, 3 if "
        "none could be compared",
    )
    output_dir: str = option(
        "outputs", "the folder of all studies; a record is <output_dir>/<study>/<cell>/record.json"
    )
    predict: Any = option(
        False,
        "auto: forecast the step time of each run before it starts; measuring for it adds up to "
        "1.5 s a run",
        words=("auto", "False"),
    )
    waterfall: bool = option(
        False, "also run with one GPU and without exchange, which shows where the lost speed goes"
    )
    report: Any = option(
        True,
        "write the study's report when the sweep ends; open: show it in a browser too; single, "
        "double: with figures as wide as one or two columns of a paper",
        words=("True", "False", "open", "single", "double"),
    )
    on_cpu: dict[str, Any] = option(
        {}, "of a named study: options of its reduced version for CPU workers"
    )
    full: bool = option(False, "CPU workers run the complete version of a named study")
    repeats: int = option(
        1, "times to run the whole sweep; each round in a new order", least=1, most=1000
    )
    noise_pairs: Any = option(
        "auto",
        "how many runs are repeated, to estimate run-to-run variation; auto: one in four if the "
        "sweep has five or more",
        least=0, most=1000, auto=True, whole=True,
    )  # fmt: skip
    ask: str | None = option(
        None,
        "measure until a question is answered. fastest: which configuration is fastest? differs: "
        "by how much does each differ from the first? scales: up to how many GPUs does the "
        "efficiency reach what efficiency= asks? gains: is one faster than the first by more than "
        "margin= asks?",
        words=QUESTIONS,
    )
    search: dict[str, Any] | None = option(
        None, "ask=gains: the benchmark to search with; training only confirms the winner"
    )
    margin: str = option("1%", "ask: candidates that differ by less may be called equal")
    budget: str | None = option(
        None, "ask: stop after this time, as in 90s, 10min or 1h; null: never"
    )
    efficiency: str = option("90%", "ask=scales: the efficiency to stay above")
    rate: str | None = option(
        None,
        "ask=fastest: which rate counts where candidates differ in their number of GPUs",
        words=RATES,
    )
    resume: bool = option(
        True, "leave out runs that are measured already; false: measure them again"
    )
    wait: bool = option(
        True,
        "wait at the end for runs that another launch.py is measuring; false: exit with status 3",
    )
    rehearse: Any = option(
        False,
        "try each run once, briefly, as if the machine had this many GPUs, to see what would fail "
        "on such a machine; true: as many as topology= has, else as this machine; not with ask or "
        "predict",
        words=("True", "False"), least=1, most=64, whole=True,
    )  # fmt: skip
    dry_run: bool = option(False, "print the runs and the time they take, start nothing")


@dataclass(frozen=True)
class Request:
    """One combination of a sweep as Hydra composed it."""

    config: Config
    overrides: list[str]


@functools.cache
def register() -> None:
    """Make the schema known to Hydra under the name that conf/config.yaml begins with.

    Remove `${oc.env:NAME}`: a record would keep the text of the variable, which may be a secret.
    """
    ConfigStore.instance().store(name="schema", node=Config)
    OmegaConf.clear_resolver("oc.env")

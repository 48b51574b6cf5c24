"""Read the command line before Hydra does: rewrite what Hydra would misread, refuse what it should
not see."""

import argparse
import itertools
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from conf.groups import ROOT, RULES, WITH_RULES, choices
from conf.options import Refused
from conf.subsets import GPUS, NODES

GROUPS = sorted(path.name for path in ROOT.iterdir() if path.is_dir() and any(path.glob("*.yaml")))
# What is there already, and which Hydra does not add to.
OVERRIDDEN = {*GROUPS, GPUS.option, NODES.option} - {"experiment"}
HYDRAS_OWN = re.compile(r"[+~]*hydra([/.@=]|$)")
FIRST_STUDY = "+experiment=first"  # what is measured where nothing is asked for
# Options that do not say what is measured, and those of their groups.
BESIDE_FIRST = ("dry_run", "output_dir", "study", "report", "resume", "tracking", "validity")
DASHED = "with dashes there are -m, --help, --version, --cfg job and --config-dir"
SCRIPT = "benchmark.run="
LONGEST_ARGUMENT = 20_000  # characters; every subset of 8 GPUs, written out, takes 2,000
# Words of a command, of which Hydra would take {host} for a dictionary.
PREFIX = re.compile(r"((?:engine\.prefix|benchmark\.(?:run|launcher))=)\[([^'\"\[\]]+)\]")
# Paths are what they are: Hydra accepts letters beyond ASCII, `#`, `(` and others in quotes only.
PATHS = re.compile(
    r"((?:output_dir|hosts|topology|tracking\.uri|engine\.(?:folder|python|ssh_config)"
    r"|profiler\.nsys_path)=)"
    r"(?=[^'])([^\",\[\]{}$\\]*[^\w\s/.+%@?:*|\",\[\]{}$\\-][^\",\[\]{}$\\]*)",
    re.ASCII,
)
# A command of the user's as one text, and a regular expression.
COMMANDS = re.compile(r"(benchmark\.(?:run|launcher|rate)=)(?!null$)([^\[\s'\"].*)", re.DOTALL)
# NCCL settings whose values may hold characters that Hydra accepts in quotes only.
SELECTIONS = re.compile(
    r"(nccl\.(?:algo|proto|ib_hca|socket_ifname)=)([^'\",\[\](){}$]*[\^;=][^'\",\[\](){}$]*)"
)


# Words of torchrun, nccl-tests and training scripts, and what to write here; {} is the value.
_GPUS = "write gpus=0,1: one rank runs on each GPU that is named"
_HOSTS = "write engine=ssh nodes=HOST1+HOST2; no master address is needed"
_TIMED = "write benchmark.max_iterations=N, or benchmark.max_seconds=SECONDS"
OTHERS_WORDS = {
    **dict.fromkeys(("nproc_per_node", "nproc", "num_gpus", "ngpus", "world_size"), _GPUS),
    **dict.fromkeys(("-g", "--gpus"), _GPUS),
    "-np": f"{_GPUS}; for several hosts, add engine=ssh nodes=HOST1+HOST2",
    **dict.fromkeys(
        ("hosts", "hostfile", "nnodes", "num_nodes", "node_rank", "master_addr", "master_port"),
        _HOSTS,
    ),
    **dict.fromkeys(("host", "-h"), _HOSTS),  # of mpirun, whose -H is no help
    **dict.fromkeys(
        ("standalone", "rdzv_backend", "rdzv_endpoint", "rdzv_id", "max_restarts"),
        "leave it out: Ringside starts the ranks itself",
    ),
    **dict.fromkeys(("lr", "learning_rate"), "write optimizer.learning_rate={}"),
    **dict.fromkeys(("epochs", "num_epochs", "max_epochs", "steps", "max_steps"), _TIMED),
    **dict.fromkeys(("iterations", "iters"), _TIMED),
    **dict.fromkeys(("bs", "batch", "batchsize"), "write batch_size={}"),
    **dict.fromkeys(("amp", "dtype", "bf16"), "write precision=bf16"),
    "fp16": "write precision=fp16",
    "fp16_allreduce": "write strategy.comm_hook=fp16",
    **dict.fromkeys(("cuda_visible_devices", "local_rank", "workers"), _GPUS),
    **dict.fromkeys(("arch", "network"), "write model={}"),
    **dict.fromkeys(("output", "outdir", "logdir", "log_dir"), "write output_dir={}"),
    "momentum": "write optimizer.momentum={}",
    "weight_decay": "write optimizer.weight_decay={}",
    "compile": "write optimize=compile",
    **dict.fromkeys(
        ("tensor_parallel", "pipeline_parallel", "tensor_parallel_size", "pipeline_parallel_size"),
        "Ringside measures data parallelism only",
    ),
    "backend": "write device=cuda (NCCL) or device=cpu (gloo)",
    **dict.fromkeys(
        ("dataset", "dataloader", "num_workers"),
        "write data.loader=my_module:load (trainers/OWN.md)",
    ),
    "name": "write study={}",
    **dict.fromkeys(("timeout", "max_time"), "write engine.cell_timeout_s={}"),
    "warmup": "write benchmark.warmup_iterations={}",
    **dict.fromkeys(
        ("benchmark=allreduce", "benchmark=all_reduce", "benchmark=all_reduce_perf"),
        "write benchmark=collectives, which measures all_reduce",
    ),
    "benchmark=sendrecv": "write benchmark=collectives benchmark.collective=send_recv",
    "benchmark=bandwidth": "write benchmark=p2p or benchmark=collectives",
    **dict.fromkeys(
        ("strategy=ddp", "strategy=allreduce", "strategy=horovod", "strategy=nccl"),
        "write strategy=nccl_allreduce",
    ),
    **dict.fromkeys(
        ("strategy=ps", "strategy=parameter_server"), "write strategy=kvstore_dist_sync"
    ),
    "strategy=deepspeed": "write strategy=zero1, strategy=zero2 or strategy=fsdp",
    "strategy=zero3": "write strategy=fsdp",
    "strategy=gloo": "write device=cpu strategy=nccl_allreduce",
    "strategy=diloco": "write strategy=local_sgd strategy.outer=nesterov",
}
ANALYSIS = ("report", "compare", "verify", "predict", "advise", "explain", "trace", "topology")
# Options of nccl-tests, and what benchmark=collectives calls them.
OF_NCCL_TESTS = {
    "-b": "min_bytes",
    "-e": "max_bytes",
    "-f": "factor",
    "-n": "iterations",
    "-w": "warmup",
}
# Words alone that ask for help, and how it is asked for here.
ASK_FOR_HELP = {
    **dict.fromkeys(("help", "-help"), ("--help",)),
    **dict.fromkeys(("version", "-v", "-V"), ("--version",)),
    **dict.fromkeys(("list", "--list"), ("--help", "list")),
    **dict.fromkeys(("examples", "--examples"), ("--help", "examples")),
}


@dataclass(frozen=True)
class CommandLine:
    """The arguments of launch.py."""

    overrides: list[str]  # as they were typed
    multirun: bool
    help: bool
    version: bool
    config: str | None  # job: print the composed configuration
    config_dir: Path | None  # a folder with YAML files of the user's own
    completion: bool  # Hydra's own, for the TAB key


def read(arguments: Sequence[str]) -> CommandLine:
    """Return the arguments of launch.py, sorted into options and overrides."""
    if len(arguments) == 1:
        arguments = ASK_FOR_HELP.get(arguments[0], arguments)
    try:
        Path.cwd()
    except FileNotFoundError:
        raise Refused("the current folder was deleted; change to another one") from None
    for argument in arguments:
        if len(argument) > LONGEST_ARGUMENT:
            raise Refused(
                f"{argument[:40]}…: {len(argument):,} characters; expected arguments of at "
                f"most {LONGEST_ARGUMENT:,}"
            )
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--multirun", "-m", action="store_true")
    parser.add_argument("--help", "-h", action="store_true")
    parser.add_argument("--version", action="store_true")
    parser.add_argument("--cfg", "-c", choices=["job"], dest="config")
    parser.add_argument("--config-dir", "-cd", type=lambda folder: Path(folder).absolute())
    parser.add_argument("--shell-completion", "-sc", action="store_true", dest="completion")
    _refuse_script(arguments)  # first: it may have options that launch.py has too
    try:
        options, overrides = parser.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise Refused(f"{error}; {DASHED}") from None
    _refuse_script(overrides, SCRIPT)
    given: dict[str, str] = {}
    for number, argument in enumerate(overrides):
        name, equals, value = argument.partition("=")
        joined = _joined(overrides[number:])
        if equals and joined != argument:
            is_one = name in (GPUS.option, NODES.option) and "+" not in joined
            is_one = is_one or "[" in joined or options.multirun
            written = joined if is_one else f"-m {joined}"
            raise Refused(
                f"{argument}: has a space next to a comma; leave out the space and write {written}"
            )
        first = given.setdefault(name, value)
        if equals and first != value:
            if name in (GPUS.option, NODES.option):  # a comma joins the members of a set
                first, value = first.replace(",", "+"), value.replace(",", "+")
            raise Refused(f"{name} is given twice; for both write -m {name}={first},{value}")
        if argument.startswith("-"):
            following = overrides[number + 1 : number + 2]
            if not equals and following and "=" not in following[0]:
                value = following[0]
            without_dashes = name.strip("-").replace("-", "_")
            meant = _others_option(name, value)
            rule = f"write options without dashes, as in gpus=0,1; {DASHED}"
            if OF_NCCL_TESTS.keys() & overrides:
                meant = _of_nccl_tests(overrides)
            elif _is_option(without_dashes):
                rule = f"write {without_dashes}={value or _example(without_dashes)}"
            raise Refused(f"{argument}: {meant or rule}")
    return CommandLine(overrides, **vars(options))


def with_first_study(arguments: Sequence[str]) -> list[str]:
    """Return the arguments, with FIRST_STUDY before them if they do not say what is measured."""
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        if not equals or name.split(".")[0] not in BESIDE_FIRST:
            return [*arguments]
    return [FIRST_STUDY, *arguments]


def others_word(word: str, value: str = "") -> str:
    """Return what to write for a word of another program's; '' where that is not known."""
    return OTHERS_WORDS.get(word.lower(), "").replace("{}", value or "VALUE")


def _others_option(name: str, value: str = "") -> str:
    without_dashes = name.strip("-").replace("-", "_")
    return others_word(name, value) or others_word(without_dashes, value)


def _joined(words: Sequence[str]) -> str:
    """Return the first word with those that only a space next to a comma parts from it."""
    whole = words[0]
    start = f"{whole.partition('=')[0]}="
    for word in words[1:]:
        is_another = word.startswith("-") or ("=" in word and not word.startswith(start))
        if (is_another and "[" not in whole) or not (whole.endswith(",") or word.startswith(",")):
            break
        whole += word.removeprefix(start)
    return whole


def _refuse_script(words: Sequence[str], start: str = "") -> None:
    """Refuse a script behind `start` that is followed by its arguments, or stands alone."""
    for number, word in enumerate(words):
        script = word.removeprefix(start)
        if word.startswith(start) and script.endswith(".py") and "=" not in script:
            command = [script if start else shlex.quote(script)]
            for other in words[number + 1 :]:
                name, equals, _ = other.lstrip("+").partition("=")
                option = name.partition(".")[0]
                if not equals or not (option in GROUPS or _is_option(option)):
                    command.append(shlex.quote(other))
            if start and len(command) == 1:
                return
            run = shlex.quote(SCRIPT + " ".join(command))
            sentence = f"{word}: to measure a training script, write benchmark=script {run}"
            for option in words[:number]:  # of torchrun or mpirun
                name = option.partition("=")[0]
                meant = _others_option(name)
                if name.startswith("-") and meant not in sentence:
                    sentence += f"; for {name} {meant}"
            raise Refused(sentence)


def _is_option(name: str) -> bool:
    from conf.schema import Config  # with Hydra, which takes a while

    return name in Config.__dataclass_fields__


def _example(option: str) -> str:
    from conf.schema import Config

    return "true" if Config.__dataclass_fields__[option].type is bool else "VALUE"


def _of_nccl_tests(words: Sequence[str]) -> str:
    options = ["benchmark=collectives"]
    for name, value in itertools.pairwise(words):
        if name in OF_NCCL_TESTS:
            options.append(f"benchmark.{OF_NCCL_TESTS[name]}={value}")
    return f"write {' '.join(options)} gpus=0,1; one rank runs on each GPU"


def _of_a_bare_word(text: str) -> str:
    for group in GROUPS:
        if text in choices(group):
            return f"write {'+' if group == 'experiment' else ''}{group}={text}"
    if text in ANALYSIS:
        return f"is a command of its own: python -m analysis {text}"
    if text in GROUPS or _is_option(text):
        return f"write {text}=VALUE, without spaces"
    if text.isdecimal():
        return "join numbers by commas, as in gpus=0,1"
    meant = others_word(text) or others_word(f"benchmark={text}") or others_word(f"strategy={text}")
    return meant or "expected option=value; python launch.py --help shows examples"


def _tune(text: str, overrides: Sequence[str]) -> str:
    studies = [name for name in choices("experiment") if name.startswith("tune_")]
    study = text.replace("tune=", "tune_", 1)
    if study not in studies:
        raise Refused(f"{text}: expected {' or '.join(studies).replace('tune_', '')}")
    for other in overrides:
        if other.partition("=")[0] in ("ask", "+experiment"):
            raise Refused(f"{text} {other}: tune asks a question of its own; leave {other} out")
    return f"+experiment={study}"


def normalise(overrides: Sequence[str]) -> list[str]:
    """Return overrides in Hydra's grammar: sets as lists, what has odd letters in quotes."""
    texts = []
    for text in NODES.normalise(GPUS.normalise(overrides)):
        if text.startswith("tune="):  # a named study that asks
            text = _tune(text, overrides)
        key, equals, _ = text.partition("=")
        group, _, option = key.lstrip("+~").partition(".")
        if not text.startswith("~") and not (equals and key.strip("+")):
            raise Refused(f"{text!r}: {_of_a_bare_word(text)}")
        if HYDRAS_OWN.match(text):
            raise Refused(
                f"{text}: Ringside runs sweeps itself and takes no options of Hydra; leave it out. "
                "On a cluster write engine=slurm (engine.submit=true engine.partition=NAME submits "
                "the command) or engine=ssh"
            )
        if "${" in text:
            raise Refused(
                f"{text}: Ringside does not expand ${{…}}; let the shell expand it, or write the "
                "value"
            )
        if group in WITH_RULES and option.partition(".")[0] in RULES:
            raise Refused(
                f"{text}: only the YAML file of a {group} can set {option}; write a file of your "
                "own and name its folder with --config-dir"
            )
        if key.startswith("+") and key.lstrip("+") in OVERRIDDEN:
            raise Refused(f"{text}: leave out the +; write {text.lstrip('+')}")
        if key == "++experiment":
            raise Refused(f"{text}: write {text[1:]}")
        if key in GROUPS and text.startswith(f"{key}=["):
            raise Refused(
                f"{text}: expected one choice; for several, add -m and leave out the brackets"
            )
        # Quotes where Hydra would misread a value.
        selection = SELECTIONS.fullmatch(text)
        path = PATHS.fullmatch(text)
        prefix = PREFIX.fullmatch(text)
        command = COMMANDS.fullmatch(text)
        if text.startswith(("nccl.other.", "nccl.env.")):  # env: what it was called
            text = f"++nccl.other.{text.split('.', 2)[2]}"
        elif selection:
            text = f"{selection[1]}'{selection[2]}'"
        elif path:
            quote = '"' if "'" in path[2] else "'"
            text = f"{path[1]}{quote}{path[2]}{quote}"
        elif command:
            value = command[2].replace("'", "\\'")
            text = f"{command[1]}'{value}'"
        elif prefix:
            words = [f"'{word}'" for word in prefix[2].split(",")]
            text = f"{prefix[1]}[{','.join(words)}]"
        texts.append(text)
    return texts

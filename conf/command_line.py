"""Read the command line before Hydra does: rewrite what Hydra would misread, refuse what it should
not see."""

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from conf.groups import ROOT, RULES, WITH_RULES
from conf.options import Refused
from conf.subsets import GPUS, NODES

GROUPS = sorted(path.name for path in ROOT.iterdir() if path.is_dir() and any(path.glob("*.yaml")))
LAUNCHER = re.compile(r"[+~]*hydra[/.]launcher\b")
FIRST_STUDY = ("+experiment=first",)  # what is measured where nothing is asked for
LONGEST_ARGUMENT = 20_000  # characters; every subset of 8 GPUs, written out, takes 2,000
# Words of a command, of which Hydra would take {host} for a dictionary.
PREFIX = re.compile(r"(engine\.prefix=)\[([^'\"\[\]]+)\]")
# Paths are what they are: Hydra accepts letters beyond ASCII, `#`, `(` and others in quotes only.
PATHS = re.compile(
    r"((?:output_dir|hosts|topology|tracking\.uri|engine\.(?:folder|python|ssh_config)"
    r"|profiler\.nsys_path)=)"
    r"(?=[^'])([^\",\[\]{}$\\]*[^\w\s/.+%@?:*|\",\[\]{}$\\-][^\",\[\]{}$\\]*)",
    re.ASCII,
)
# NCCL settings whose values may hold characters that Hydra accepts in quotes only.
SELECTIONS = re.compile(
    r"(nccl\.(?:algo|proto|ib_hca|socket_ifname)=)([^'\",\[\](){}$]*[\^;=][^'\",\[\](){}$]*)"
)


@dataclass(frozen=True)
class CommandLine:
    """The arguments of launch.py."""

    overrides: list[str]  # as they were typed
    multirun: bool
    help: bool
    version: bool
    config: bool  # print the composed configuration
    config_dir: Path | None  # a folder with YAML files of the user's own
    completion: bool  # Hydra's own, for the TAB key


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise Refused(f"{message}; options are -m, --help, --version, --cfg job and --config-dir")


def read(arguments: Sequence[str]) -> CommandLine:
    """Return the arguments of launch.py, sorted into options and overrides."""
    try:
        Path.cwd()
    except FileNotFoundError:
        raise Refused("the current folder was deleted; change to another one") from None
    for argument in arguments:
        if len(argument) > LONGEST_ARGUMENT:
            raise Refused(
                f"{argument[:40]}…: {len(argument):,} characters; accepted are arguments of at "
                f"most {LONGEST_ARGUMENT:,}"
            )
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--multirun", "-m", action="store_true")
    parser.add_argument("--help", "-h", action="store_true")
    parser.add_argument("--version", action="store_true")
    parser.add_argument("--cfg", "-c", choices=["job"])
    parser.add_argument("--config-dir", "-cd")
    parser.add_argument("--shell-completion", "-sc", action="store_true")
    options, overrides = parser.parse_known_args(arguments)
    for argument in overrides:
        if argument.startswith("-"):
            raise Refused(
                f"{argument}: unknown; write options without dashes, as in gpus=0,1 (with dashes "
                "there are -m, --help, --version, --cfg job and --config-dir)"
            )
    folder = None
    if options.config_dir is not None:
        folder = Path(options.config_dir).absolute()
    return CommandLine(
        overrides=overrides,
        multirun=options.multirun,
        help=options.help,
        version=options.version,
        config=options.cfg == "job",
        config_dir=folder,
        completion=options.shell_completion,
    )


def normalise(overrides: Sequence[str]) -> list[str]:
    """Return overrides in Hydra's grammar: sets as lists, what has odd letters in quotes."""
    texts = []
    for text in NODES.normalise(GPUS.normalise(overrides)):
        key, equals, _ = text.partition("=")
        group, _, option = key.lstrip("+~").partition(".")
        if not text.startswith("~") and not (equals and key.strip("+")):
            raise Refused(
                f"{text!r}: accepted is option=value; python launch.py --help shows examples"
            )
        if LAUNCHER.match(text):
            raise Refused(
                f"{text}: Hydra's launchers run each cell by itself, and cells that are compared "
                "must be one sweep; accepted is engine=slurm, with engine.submit=true to submit "
                "the whole command, or engine=ssh"
            )
        if "${" in text:
            raise Refused(
                f"{text}: a record would keep what it stands for; let the shell expand it, or "
                "write it out"
            )
        if group in WITH_RULES and option.partition(".")[0] in RULES:
            raise Refused(
                f"{text}: {option} stands in the YAML file of a {group} only; write a file of your "
                "own and name its folder with --config-dir"
            )
        if key in GROUPS and text.startswith(f"{key}=["):
            raise Refused(f"{text}: accepted is one choice, or with -m several without brackets")
        # Quotes where Hydra would misread a value.
        selection = SELECTIONS.fullmatch(text)
        path = PATHS.fullmatch(text)
        prefix = PREFIX.fullmatch(text)
        if text.startswith(("nccl.other.", "nccl.env.")):  # env: what it was called
            text = f"++nccl.other.{text.split('.', 2)[2]}"
        elif selection:
            text = f"{selection[1]}'{selection[2]}'"
        elif path:
            quote = "'"
            if quote in path[2]:
                quote = '"'
            text = f"{path[1]}{quote}{path[2]}{quote}"
        elif prefix:
            words = [f"'{word}'" for word in prefix[2].split(",")]
            text = f"{prefix[1]}[{','.join(words)}]"
        texts.append(text)
    return texts

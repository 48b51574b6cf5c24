"""Read the command line before Hydra does: rewrite what Hydra would misread, refuse what it should not see."""

import argparse
import contextlib
import itertools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from conf.gpus import GPUS
from conf.groups import ROOT, WITH_RULES
from conf.nodes import NODES
from conf.options import Refused
from conf.rules import RULES

GROUPS = sorted(path.name for path in ROOT.iterdir() if path.is_dir() and any(path.glob("*.yaml")))

# Hydra's own options, and which of them take a value.
FLAGS = (
    "-m",
    "--multirun",
    "-r",
    "--run",
    "-h",
    "--help",
    "--hydra-help",
    "--version",
    "--resolve",
    "-sc",
    "--shell-completion",
)
CONFIG_DIR = ("-cd", "--config-dir")
FOLDERS = ("-cp", "--config-path", *CONFIG_DIR)
VALUED = (
    "-c",
    "--cfg",
    "-p",
    "--package",
    "-cp",
    "--config-path",
    "-cn",
    "--config-name",
    *CONFIG_DIR,
)
LAUNCHER = re.compile(r"[+~]*hydra[/.]launcher\b")
LONGEST_ARGUMENT = 20_000  # characters; every subset of 8 GPUs, written out, takes 2,000
INFO = ("-i", "--info")
# Words of a command, of which Hydra would take {host} for a dictionary.
PREFIX = re.compile(r"(engine\.prefix=)\[([^'\"\[\]]+)\]")
# An option of a group, with one value: a word, a list or a text in quotes.
ONE_VALUE = re.compile(r"""((\w+)\.[\w.]+=)([\w.+-]+|\[[\w.,-]*\]|'[^'\\]*'|"[^"\\]*")""")
QUOTED = re.compile(r"""(['"])[\w.+-]*\1""")
INFORMING = (
    "-h",
    "--help",
    "--hydra-help",
    "--version",
    "-sc",
    "--shell-completion",
    "-c",
    "--cfg",
    *INFO,
)
# Paths are what they are: Hydra accepts letters beyond ASCII, `#`, `(` and others in quotes only.
PATHS = re.compile(
    r"((?:output_dir|hosts|topology|tracking\.uri|engine\.(?:folder|python|ssh_config)|profiler\.nsys_path)=)"
    r"(?=[^'])([^\",\[\]{}$\\]*[^\w\s/.+%@?:*|\",\[\]{}$\\-][^\",\[\]{}$\\]*)",
    re.ASCII,
)
# NCCL settings whose values may hold characters that Hydra accepts in quotes only.
SELECTIONS = re.compile(
    r"(nccl\.(?:algo|proto|ib_hca|socket_ifname)=)([^'\",\[\](){}$]*[\^;=][^'\",\[\](){}$]*)"
)


def normalise(arguments: Sequence[str]) -> list[str]:
    """Return the arguments as Hydra shall read them: its own options first, because argparse finds none behind overrides.

    `gpus=…` and `nodes=…` become canonical text, NCCL's `^` and `;` and paths come into quotes, and `nccl.other.NAME=…` may
    name a new key.

    Raises:
        Refused: names the argument and the right form; or the current folder is gone, which Hydra would look for.
    """
    try:
        Path.cwd()
    except FileNotFoundError:
        raise Refused("the current folder was deleted; change to another one") from None
    for argument in arguments:
        if len(argument) > LONGEST_ARGUMENT:
            raise Refused(
                f"{argument[:40]}…: {len(argument):,} characters; accepted are arguments of at most {LONGEST_ARGUMENT:,}"
            )
    options, overrides = separated(arguments)
    return [*options, *map(_rewritten, NODES.normalise(GPUS.normalise(overrides)))]


def in_each_choice(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with one value for several strategies or benchmarks as a sweep of that value alone.

    Every other value Hydra sets in the default choice too, before it comes to the typed ones, and that may not have the option.
    """
    if not {"-m", "--multirun"}.intersection(arguments):
        return [*arguments]
    swept = {
        group for group in WITH_RULES if any(re.match(f"{group}=.*[,(]", one) for one in arguments)
    }
    return [
        f"{found[1]}choice({QUOTED.sub(_quoted_twice, found[3])})"
        if (found := ONE_VALUE.fullmatch(one)) and found[2] in swept
        else one
        for one in arguments
    ]


def _quoted_twice(word: "re.Match[str]") -> str:
    """Return a word in quotes inside others, of which Hydra takes one pair: '2' and 'null' stay texts."""
    return repr(word[0])


@contextlib.contextmanager
def hydras_options() -> Iterator[None]:
    """Have argparse, by which Hydra reads its own options, raise Refused instead of printing lines and ending the process."""
    kept = argparse.ArgumentParser.error

    def refuse(parser: argparse.ArgumentParser, message: str) -> NoReturn:
        raise Refused(f"{message}; options are -m, --help, --cfg job and those of --hydra-help")

    argparse.ArgumentParser.error = refuse  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        argparse.ArgumentParser.error = kept  # type: ignore[method-assign]


def config_dirs(arguments: Sequence[str]) -> list[Path]:
    """Return the folder that `--config-dir DIR` or `--config-dir=DIR` names, absolute; of several the last, as Hydra does."""
    found: list[str] = []
    for argument, following in itertools.zip_longest(arguments, arguments[1:], fillvalue=""):
        name, equals, value = argument.partition("=")
        if name in CONFIG_DIR:
            found.append(value if equals else following)
    return [Path(folder).absolute() for folder in found[-1:] if folder]


def refuse_no_cell(arguments: Sequence[str]) -> None:
    """Refuse a request that names no cell, unless it asks for help or a listing. Raises Refused."""
    if not any(argument.partition("=")[0] in INFORMING for argument in arguments):
        raise Refused(f"{' '.join(arguments)}: names no cell; each option of a sweep needs a value")


def separated(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return (Hydra's own options with their values, overrides). Raises Refused for an unknown option."""
    options: list[str] = []
    overrides: list[str] = []
    waiting = ""  # the option whose value may be the next argument
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        if argument.startswith("-"):
            if name not in (*FLAGS, *VALUED, *INFO):
                raise Refused(
                    f"{argument}: unknown; write options without dashes, as in gpus=0,1 (with dashes there are -m, --help, "
                    "--cfg job and those of --hydra-help)"
                )
            options.append(argument)
            waiting = "" if equals else name
            continue
        if waiting in VALUED and equals and waiting not in FOLDERS:
            raise Refused(
                f"{waiting} {argument}: {waiting} has no value; {argument} would be taken for it"
            )
        (options if waiting in VALUED or (waiting in INFO and not equals) else overrides).append(
            argument
        )
        waiting = ""
    return list(_with_info(options)), overrides


def _with_info(options: Sequence[str]) -> Iterator[str]:
    """Yield options with a value for each bare --info: argparse would take the first override for it."""
    for option, following in itertools.zip_longest(options, options[1:], fillvalue="-"):
        yield option
        if option in INFO and following.startswith("-"):
            yield "all"


def _rewritten(argument: str) -> str:
    """Return one override as Hydra shall read it. Raises Refused."""
    key, equals, _ = argument.partition("=")
    if not argument.startswith("~") and not (equals and key.strip("+")):
        raise Refused(
            f"{argument!r}: accepted is option=value; python launch.py --help shows examples"
        )
    if LAUNCHER.match(argument):
        raise Refused(
            f"{argument}: Hydra's launchers run each cell by itself, and cells that are compared must be one sweep; accepted is "
            "engine=slurm, with engine.submit=true to submit the whole command, or engine=ssh"
        )
    if "${" in argument:
        raise Refused(
            f"{argument}: a record would keep what it stands for; let the shell expand it, or write it out"
        )
    group, _, option = key.lstrip("+~").partition(".")
    if group in WITH_RULES and option.partition(".")[0] in RULES:
        raise Refused(
            f"{argument}: {option} stands in the YAML file of a {group} only; write a file of your own and name its folder "
            "with --config-dir"
        )
    if key in GROUPS and argument.startswith(f"{key}=["):
        raise Refused(f"{argument}: accepted is one choice, or with -m several without brackets")
    if argument.startswith(("nccl.other.", "nccl.env.")):  # env: what it was called
        return f"++nccl.other.{argument.split('.', 2)[2]}"
    if selection := SELECTIONS.fullmatch(argument):
        return f"{selection[1]}'{selection[2]}'"
    if path := PATHS.fullmatch(argument):
        quote = '"' if "'" in path[2] else "'"
        return f"{path[1]}{quote}{path[2]}{quote}"
    if prefix := PREFIX.fullmatch(argument):
        return prefix[1] + "[" + ",".join(f"'{word}'" for word in prefix[2].split(",")) + "]"
    return argument

"""The command line before Hydra reads it."""

import re
from collections.abc import Sequence

from conf import gpus
from conf.knobs import Refused

# Hydra's own options, and which of them take a value.
FLAGS = ("-m", "--multirun", "-r", "--run", "-h", "--help", "--hydra-help", "--version", "--resolve", "-sc", "--shell-completion")
VALUED = ("-c", "--cfg", "-p", "--package", "-cp", "--config-path", "-cn", "--config-name", "-cd", "--config-dir")
INFO = ("-i", "--info")
INFORMING = ("-h", "--help", "--hydra-help", "--version", "-sc", "--shell-completion", "-c", "--cfg", *INFO)
# NCCL settings whose own grammar has characters that Hydra's refuses outside quotes.
SELECTIONS = re.compile(r"(nccl\.(?:algo|proto|ib_hca|socket_ifname)=)([^'\",\[\](){}$]*[\^;=][^'\",\[\](){}$]*)")


def normalise(arguments: Sequence[str]) -> list[str]:
    """Rewrite `gpus=…` into canonical text, quote NCCL's `^` and `;`, let `nccl.env.NAME=…` name a new key.

    Hydra's own options come first in what is returned: Python's argparse would not find options behind them.

    Raises:
        Refused: names the argument and the right form.
    """
    options, overrides = _separated(arguments)
    return [*options, *map(_rewritten, gpus.normalise(overrides))]


def only_informs(arguments: Sequence[str]) -> bool:
    """Whether the command asks for help or a listing, so that nothing is to be run."""
    return any(argument.partition("=")[0] in INFORMING for argument in arguments)


def _separated(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Hydra's own options with their values, and the overrides."""
    options: list[str] = []
    overrides: list[str] = []
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        before = options[-1] if options and not overrides[-1:] == [argument] else ""
        if argument.startswith("-"):
            if name not in (*FLAGS, *VALUED, *INFO):
                raise Refused(f"{argument}: unknown; options are -m, --help, --cfg job and those of --hydra-help")
            options.append(argument)
        elif not equals and (before in VALUED or before in INFO):
            options.append(argument)
        else:
            overrides.append(argument)
    return options, overrides


def _rewritten(argument: str) -> str:
    """One override as Hydra shall read it."""
    key, equals, _ = argument.partition("=")
    if not argument.startswith("~") and not (equals and key.strip("+")):
        raise Refused(f"{argument!r}: accepted is option=value; python launch.py --help shows examples")
    if "${" in argument and ":" in argument.split("${", 1)[1]:
        raise Refused(f"{argument}: a record would keep what a resolver reads; let the shell expand it, or set it plainly")
    if argument.startswith("nccl.env."):
        return f"++{argument}"
    if selection := SELECTIONS.fullmatch(argument):
        return f"{selection[1]}'{selection[2]}'"
    return argument

"""Answer `--help`, `--help TOPIC` and `--version` without composing a request."""

import dataclasses
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, get_origin

import yaml
from omegaconf import MISSING
from rich import box
from rich.markup import escape
from rich.table import Table

from analysis.console import console
from benchmarks.record.safe_text import end_process as end_process
from benchmarks.record.safe_text import forgive
from conf import groups, subsets
from conf.command_line import GROUPS, CommandLine
from conf.nccl import in_table
from conf.options import Refused, accepted, metadata_of
from conf.schema import Config
from launch.hydra_errors import KINDS

EXPLAINED_TOO = ("efficiency",)  # an option and a metric
# {topic: how the parts of the help that it names begin}
SECTIONS: dict[str, tuple[str, ...]] = {"list": ("Groups", "Named"), "examples": ("Examples",)}


def answer(line: CommandLine) -> None:
    """Print the version, the whole help, or the help of each topic.

    Raises Refused: there is no such group, choice or option.
    """
    forgive(sys.stdout)
    if line.version:
        from launch.machine.facts import version_lines  # imports what help need not wait for

        print(*version_lines(), sep="\n")
    elif not line.overrides:
        print(*_sections(""), sep="\n\n")
    for topic in line.overrides if line.help else ():
        out = console()
        if topic in SECTIONS:
            print(*_sections(topic), sep="\n\n")
            continue
        # A group (nccl), a choice (strategy=none) or an option (nccl.algo, or NCCL_ALGO).
        key, _, value = topic.lstrip("+~").partition("=")
        if in_table(key.upper()):
            key = f"nccl.{key.lower().removeprefix('nccl_')}"
        group = key.partition(".")[0]
        if key in GROUPS and value in groups.choices(key):
            file = groups.files(key)[value]
            if key not in groups.WITH_RULES:
                out.print(file.read_text(encoding="utf-8").rstrip(), markup=False)
                continue
            out.print(about_choice(key, value), markup=False)
            out.print(_table(["option", "meaning", "accepted", "default"], choice_rows(key, value)))
            continue
        if key in GROUPS:
            choices = [(name, about_choice(group, name)) for name in groups.choices(group)]
            out.print(_table([f"{group}=", "meaning"], choices))
        for option, words in (("gpus", subsets.GPU_WORDS), ("nodes", subsets.NODE_WORDS)):
            if key == option:
                out.print(_table([f"{option}=", "meaning"], words.items()))
        options = []
        rows = []
        for row in option_rows(Config, ""):
            options.append(row[0])
            if row[0] == key or row[0].startswith(f"{key}."):
                rows.append(row)
        if rows:
            out.print(_table(["option", "meaning", "accepted", "default"], rows))
        if group in groups.WITH_RULES and key != group:
            rows = []
            for name in groups.choices(group):
                for option, meaning, accepts, default in choice_rows(group, name):
                    if key == f"{group}.{option}":
                        rows.append((f"{group}={name}", meaning, accepts, default))
            if not rows:
                raise Refused(f"-h {key}: no {group} has such an option; see -h {group}")
            out.print(_table(["of", "meaning", "accepted", "default"], rows))
        elif group in groups.WITH_RULES:
            out.print(f"Options of one of them: python launch.py -h {group}=NAME", markup=False)
        elif (not rows or topic in EXPLAINED_TOO) and key not in GROUPS:
            from analysis.commands.definitions import explained

            of_groups = [name for name in GROUPS if topic in groups.choices(name)]
            try:
                definition = explained(topic, [*GROUPS, *options])
            except ValueError as error:
                if not of_groups:
                    raise Refused(f"-h {error}") from None
                lines = [f"{name}={topic}: {about_choice(name, topic)}" for name in of_groups]
                definition = "\n".join(lines)
            out.print(definition, markup=False, highlight=False)


def _sections(topic: str) -> list[str]:
    """Return the parts of the help that a topic names; '' names all."""
    config = yaml.safe_load((groups.ROOT / "config.yaml").read_text(encoding="utf-8"))
    text = config["hydra"]["help"]
    lines = ["Groups (group=choice)"]
    for group in GROUPS:
        choices = f"{group}: {', '.join(groups.choices(group))}"
        lines += textwrap.wrap(choices, 78, initial_indent="  ", subsequent_indent="    ")
    sections = [text["header"].rstrip(), "\n".join(lines), *text["footer"].rstrip().split("\n\n")]
    return [section for section in sections if section.startswith(SECTIONS.get(topic, ("",)))]


def option_rows(kind: Any, prefix: str) -> Iterator[tuple[str, str, str, str]]:
    """Yield (option, meaning, accepted, default) of each field of a dataclass, and of those inside
    it."""
    for field in dataclasses.fields(kind):
        key = f"{prefix}{field.name}"
        if dataclasses.is_dataclass(field.type):
            yield from option_rows(field.type, f"{key}.")
        elif key not in groups.WITH_RULES and field.metadata:
            limits = metadata_of(field)
            accepts = accepted(limits) or KINDS.get(get_origin(field.type) or field.type, "")
            default = ""
            if field.default not in (dataclasses.MISSING, MISSING):
                default = yaml.safe_dump(field.default, allow_unicode=True).splitlines()[0]
            yield key, limits["help"], accepts, default


def about_choice(group: str, name: str) -> str:
    """Return the first comment in the YAML file of a choice; empty where it has none."""
    words: list[str] = []
    for line in groups.files(group)[name].read_text(encoding="utf-8").splitlines():
        if line.startswith("# @package"):
            continue
        if not line.startswith("# ") or line.startswith("#  "):  # the end, or an indented command
            break
        words.append(line.removeprefix("# ").strip())
    return " ".join(words)


def choice_rows(group: str, name: str) -> list[tuple[str, str, str, str]]:
    """Return (option, meaning, accepted, default) of each option of a choice; the meaning is the
    comment beside it in its YAML file."""
    choice = groups.choice(group, name)
    text = choice.path.read_text(encoding="utf-8")
    rows = []
    for option, default in choice.options.items():
        if option == "name":
            continue
        comment = re.search(rf"^{re.escape(option)}:[^#\n]*# *(.*)$", text, re.MULTILINE)
        meaning = comment[1] if comment else ""
        accepts = accepted(choice.accepts.get(option, {}))
        value = yaml.safe_dump(default, allow_unicode=True).splitlines()[0]
        rows.append((option, meaning, accepts, value))
    return rows


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    table = Table(*headings, box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for row in rows:
        table.add_row(*map(escape, row))
    table.columns[0].no_wrap = True
    return table

"""`python launch.py -h TOPIC`: what a group, one of its choices or an option means, and what it accepts."""

from collections.abc import Iterable, Sequence

from rich import box
from rich.markup import escape
from rich.table import Table

from analysis.console import console
from conf import gpus, groups, nodes
from conf.command_line import GROUPS, separated
from conf.options import Refused, closest
from launch.help.options import Option, about_choice, default_choices, options, options_of

_HELP = ("-h", "--help")


def topics(typed: Sequence[str]) -> list[str]:
    """Return what help is asked for: the words beside -h. Without -h, or with nothing beside it, that is none.

    Raises:
        Refused: an unknown option that begins with a dash.
    """
    if not any(argument in _HELP for argument in typed):
        return []
    _, words = separated(typed)
    return [word.lstrip("+~") for word in words]


def show(topic: str) -> None:
    """Print the help of a group (`nccl`), a choice (`strategy=none`) or an option (`nccl.algo`). Raises Refused: unknown."""
    out = console()
    key, _, value = topic.partition("=")
    chosen = value if key in GROUPS and value in groups.choices(key) else ""
    if key in GROUPS:
        names = [chosen] if chosen else groups.choices(key)
        out.print(
            _table([f"{key}=", "meaning"], ((name, about_choice(key, name)) for name in names))
        )
    for option, words in (("gpus", gpus.WORDS), ("nodes", nodes.WORDS)):
        if key == option:
            out.print(_table([f"{option}=", "meaning"], words.items()))
    listed = _listed(key, chosen)
    if listed:
        rows = ((one.key, one.meaning, one.accepts, one.default) for one in listed)
        out.print(_table(["option", "meaning", "accepted", "default"], rows))
        if any(one.key.startswith("nccl.") and one.default == "null" for one in listed):
            out.print("null: Ringside leaves the variable as it is", markup=False)
    elif key in groups.WITH_RULES and not chosen:
        out.print(
            f"Options of one of them: python launch.py -h {key}={default_choices()[key]}",
            markup=False,
            soft_wrap=True,
        )


def _listed(key: str, chosen: str) -> list[Option]:
    """Return the options that a topic is about; of a group whose choices differ in options, those of the chosen one."""
    if key in groups.WITH_RULES:
        return list(options_of(key, chosen)) if chosen else []
    group = key.partition(".")[0]
    known = list(options({}))
    if group in groups.WITH_RULES:  # every option that some choice has
        known = list(
            {
                one.key: one for name in groups.choices(group) for one in options_of(group, name)
            }.values()
        )
    found = [one for one in known if one.key == key or one.key.startswith(f"{key}.")]
    if not found and key not in GROUPS:
        names = [*GROUPS, *(one.key for one in known)]
        raise Refused(
            f"-h {key}: no group or option; the groups are {', '.join(GROUPS)}{closest(key, names)}"
        )
    return found


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Return a table whose long texts go on in the next line of their column."""
    table = Table(*heads, box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for row in rows:
        table.add_row(*map(escape, row))
    table.columns[0].no_wrap = True
    return table

"""What the TAB key completes, in place of Hydra's own: GPU ids, hosts and words, the values of every option, lists with commas.

Hydra composes a configuration to list its keys, and knows the present value of an option, not those that it accepts.
"""

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import Any

from hydra.core.plugins import Plugins

from conf import groups
from conf.command_line import FLAGS, GROUPS, VALUED, config_dirs
from conf.gpus import WORDS
from conf.nodes import WORDS as WORDS_OF_NODES
from conf.nodes import listed_hosts
from conf.options import Refused
from launch.help.options import Option, options
from launch.machine.devices import look

SETS = ("gpus", "nodes", "strategy.server_nodes")  # of which `+` joins members
_CHOSEN = [
    group for group in GROUPS if group != "experiment"
]  # it has no default and is added with +
# The words up to launch.py are how it is called: with any Python, from any folder. zsh reads this one too, by bashcompinit.
BASH = r"""_ringside() {
    local line="${COMP_LINE:0:$COMP_POINT}" last=-1 n
    for ((n = 0; n < ${#COMP_WORDS[@]}; n++)); do
        case "${COMP_WORDS[n]}" in launch.py | */launch.py) last=$n; break ;; esac
    done
    COMPREPLY=()
    [ "$last" -ge 0 ] || return
    local call=("${COMP_WORDS[@]:0:$last+1}") word="${line##* }" before="" found
    # A shell that ends words at `=` or `:` completes only what stands behind.
    case "$COMP_WORDBREAKS" in *=*) before="${word%"${word##*[=:]}"}" ;; esac
    while IFS= read -r found; do
        COMPREPLY+=("${found#"$before"}")
    done < <(COMP_LINE="launch.py ${line#*launch.py }" "${call[@]}" -sc query=bash 2>/dev/null)
}
complete -o nospace -o default -F _ringside python python3"""
FISH = r"""function _ringside
    set -l call (commandline -opc)
    set -l words
    while not string match -qr '(^|/)launch\.py$' -- $call[-1]
        set -p words $call[-1]
        set -e call[-1]
    end
    set -lx COMP_LINE (string join ' ' -- launch.py $words "$(commandline -ct)")
    $call -sc query=fish 2>/dev/null
end
function _ringside_asked
    commandline -opc | string match -qr '(^|/)launch\.py$'
end
for python in python python3
    complete -c $python -n _ringside_asked -x -a '(_ringside)'
    complete -c $python -n _ringside_asked -s m -x -a '(_ringside)'  # else a module's name is expected behind -m
end"""


def register() -> None:
    """Have Hydra's `--shell-completion` print these scripts and these completions."""
    names = Plugins.instance().class_name_to_class  # as in launch.compose.sweeper
    for shell, script in (("Bash", BASH), ("Fish", FISH)):  # zsh's plugin calls bash's
        plugin: Any = names[
            f"hydra._internal.core_plugins.{shell.lower()}_completion.{shell}Completion"
        ]
        plugin.install = lambda plugin, script=script: print(script)
        plugin.query = lambda plugin, config_name: print(
            "\n".join(completions(os.environ["COMP_LINE"].partition(" ")[2]))
        )


def completions(line: str) -> list[str]:
    """Return what the last word of a command line, without the program's name, may become; sorted."""
    *before, word = line.split(" ")
    groups.search_also(config_dirs(before))
    if word.startswith("-"):
        return sorted(flag for flag in (*FLAGS, *VALUED) if flag.startswith(word))
    text = word.lstrip("+~")
    prefix = word.removesuffix(text)
    found = set(_values(text, before) if "=" in text else _keys(text, prefix, before))
    return sorted(f"{prefix}{one}" for one in found) + (["+experiment="] if not word else [])


def _keys(text: str, prefix: str, before: Sequence[str]) -> Iterator[str]:
    """Yield the keys that begin with a text, up to their next dot."""
    keys = ["experiment"] if prefix == "+" else [*_CHOSEN, *(one.key for one in _options(before))]
    for key in keys:
        if key.startswith(text):
            part, dot, _ = key.removeprefix(text).partition(".")
            yield f"{text}{part}{dot or '='}"


def _values(text: str, before: Sequence[str]) -> Iterator[str]:
    """Yield `key=value` for what an option accepts; behind a comma what is not in the list yet."""
    key, _, value = text.partition("=")
    end = max(value.rfind(mark) for mark in (",+" if key in SETS else ",")) + 1
    head, last = value[:end], value[end:]
    if key in GROUPS:
        known: Sequence[str] = groups.choices(key)
    elif key == "gpus":  # words stand alone
        known = [*map(str, look("auto", os.environ).everyone), *([] if head else WORDS)]
    elif key in SETS:
        known = [*_hosts(before), *([] if head else WORDS_OF_NODES if key == "nodes" else ["auto"])]
    else:
        known = next((one.values for one in _options(before) if one.key == key), ())
    listed = head.replace("+", ",").split(",")
    yield from (f"{key}={head}{one}" for one in known if one.startswith(last) and one not in listed)


def _hosts(before: Sequence[str]) -> Sequence[str]:
    """Return the names of the hosts in the file that the line names; none where it cannot be read."""
    path = next(
        (word.removeprefix("hosts=") for word in reversed(before) if word.startswith("hosts=")),
        None,
    )
    with contextlib.suppress(Refused):
        return [host.name for host in listed_hosts(path)] if path else []
    return []


def _options(before: Sequence[str]) -> Sequence[Option]:
    """Return every option, with those of the strategy, benchmark and profiler that the line names."""
    pairs = (word.partition("=") for word in before)
    chosen = {
        group: value
        for group, _, value in pairs
        if group in groups.WITH_RULES and value in groups.choices(group)
    }
    return list(options(chosen))

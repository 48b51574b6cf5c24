"""The grammar of `nodes=`, which names hosts as `gpus=` names GPUs, and of the file that `hosts=` names.

`a,b` is ONE set of hosts, in rank order; `a+b,a+c` are two; `a,a+b` is one host, then two. A number is a count: `2` is the
first two hosts that are known, `1,2` first one host, then two.
"""

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from conf.cell import HOST_NAME
from conf.gpus import PLAIN_WORDS, Grammar, expand
from conf.options import Refused

COUNT = re.compile(r"[1-9][0-9]{0,3}", re.ASCII)
WORD = re.compile(rf"{COUNT.pattern}|all|each|pairs|scale|classes", re.ASCII)
WORDS = {
    "2": "the first two hosts; 1,2: one host, then two",
    "all": "every host, as one set",
    "each": "every host alone",
    "pairs": "every two hosts",
    "scale": "the first 1, 2, 4, … hosts, and all",
    "classes": "one set for each way in which switches join hosts, of every size",
}
FORMS = (
    "write one set of hosts as nodes=a,b, several as nodes=a+b,a+c, a number of hosts as nodes=2, or a word: all, each, pairs, "
    "scale, classes"
)
LARGEST_BYTES = 1 << 20  # of a file of hosts
MOST_HOSTS = 4096
A_FILE = "accepted is a file with a host a line"


def is_name(text: str) -> bool:
    """Return whether a text may be the name of a host: a pure number is a count, and no word is a name."""
    return bool(HOST_NAME.fullmatch(text)) and not text.isdecimal() and not WORD.fullmatch(text)


def _is_plain(text: str) -> bool:
    return bool(WORD.fullmatch(text))


NODES = Grammar(
    "nodes", "host", "set of hosts", "name of a host, number or word", FORMS, is_name, WORD, _is_plain,
    alone_beside_sets=True,
)  # fmt: skip


@dataclass(frozen=True)
class ListedHost:
    """A host of a file, as MXNet's -H and Open MPI's hostfiles have them."""

    name: str
    slots: int | None  # the ranks that it may have; None: as many as the subset
    line: int


@functools.lru_cache(maxsize=1)
def listed_hosts(path: str) -> tuple[ListedHost, ...]:
    """Return the hosts of a file: one a line, with `slots=N` behind it or not; `#` begins a comment. It is read once.

    Raises:
        Refused: the file cannot be read or names no host; or a line is wrong, by its number.
    """
    found: dict[str, ListedHost] = {}
    for number, line in enumerate(_text(path).split("\n"), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        host = _host(f"hosts={path}: line {number}", words, number)
        if host.name in found:
            raise Refused(
                f"hosts={path}: line {number}: host {host.name} stands in line {found[host.name].line} already; accepted is "
                "each host once, with slots=N for its ranks"
            )
        found[host.name] = host
        if len(found) > MOST_HOSTS:
            raise Refused(
                f"hosts={path}: line {number}: more than {MOST_HOSTS:,} hosts; accepted are fewer"
            )
    if not found:
        raise Refused(f"hosts={path}: names no host; {A_FILE}")
    return tuple(found.values())


def _text(path: str) -> str:
    """Return the text of a file of hosts. Raises Refused."""
    file = Path(path)
    try:
        if not file.is_file():  # a pipe or a device would be waited for
            raise Refused(f"hosts={path}: there is no such file; {A_FILE}")
        with file.open("rb") as opened:
            data = opened.read(LARGEST_BYTES + 1)
    except OSError as error:
        raise Refused(f"hosts={path}: cannot be read ({error.strerror}); {A_FILE}") from None
    if len(data) > LARGEST_BYTES:
        raise Refused(f"hosts={path}: larger than {LARGEST_BYTES >> 20} MiB; {A_FILE}")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise Refused(f"hosts={path}: line {line}: is no text in UTF-8; {A_FILE}") from None


def _host(where: str, words: Sequence[str], number: int) -> ListedHost:
    """Return the host of a line. Raises Refused, which begins with `where`."""
    name, *options = words
    if not is_name(name):
        raise Refused(
            f"{where}: {name[:300]!r} is no name of a host; accepted are letters, digits, '.', '-' and '_', and not digits alone"
            + (
                "; ports and users belong in the configuration of ssh"
                if re.search("[:@]", name)
                else ""
            )
        )
    slots = (
        re.fullmatch(r"slots=([1-9][0-9]{0,3})", options[0], re.ASCII)
        if len(options) == 1
        else None
    )
    if options and not slots:
        raise Refused(
            f"{where}: {' '.join(options)[:300]!r} behind host {name}; accepted is slots=N, or nothing"
        )
    return ListedHost(name, int(slots[1]) if slots else None, number)


def host_sets(tokens: Sequence[str], names: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the ordered sets of hosts that a `nodes` list means, where `names` are the hosts that are known; not `classes`.

    Raises:
        Refused: a host that is not known, or more hosts than there are.
    """
    typed = ",".join(tokens)
    members = NODES.one_set(tokens, typed)
    if members[0] in PLAIN_WORDS:
        return expand(members[0], names)
    known = (
        f"{len(names)} {'is' if len(names) == 1 else 'are'} known: {shown(names)}"
        if names
        else "none is known"
    )
    if COUNT.fullmatch(members[0]):
        if int(members[0]) > len(names):
            raise Refused(f"nodes={typed}: wants {members[0]} hosts, and {known}")
        return [tuple(names[: int(members[0])])]
    if unknown := next((name for name in members if name not in names), None):
        raise Refused(f"nodes={typed}: host {unknown} is not known; {known}")
    return [tuple(members)]


def shown(names: Sequence[str]) -> str:
    """Return the first names, and how many more there are."""
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")

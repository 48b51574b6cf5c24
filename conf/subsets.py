"""The grammar of `gpus=` and `nodes=`: typed text becomes text that Hydra reads as meant, and words
become ordered sets.

`gpus=0,3` is ONE subset. Hydra would read it as a sweep over 0 and 3 (and `1_3` as the number 13),
so the text is rewritten before Hydra sees it: `gpus=0,3` becomes `gpus=[0,3]`, and several subsets
become a sweep of lists, `gpus=[0,1],[0,3]`.

`nodes=` names hosts in the same way: `a,b` is ONE set of hosts, in rank order; `a+b,a+c` are two;
`a,a+b` is one host, then two. A number is a count: `2` is the first two hosts that are known, `1,2`
first one host, then two. `hosts=` names a file.
"""

import functools
import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from conf.cell import HOST_NAME
from conf.options import Refused

T = TypeVar("T")
CPU_SLOTS = 8  # for CPU workers, of a machine without GPUs
NUMBER = re.compile(r"0|[1-9][0-9]{0,3}")
UUID = re.compile(r"(GPU|MIG)-[0-9A-Za-z-]{4,64}")
BUS_ID = re.compile(r"([0-9A-Fa-f]{4,8}:)?[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-7]")
PLAIN_WORDS = ("all", "each", "neighbours", "pairs", "scale")
GPU_WORD = re.compile(
    r"all|each|neighbours|pairs|scale|classes(:[1-9][0-9]{0,3})?|(best|worst|worst_order):[1-9][0-9]{0,3}"
)
# One subset is `0+3`, `[0,3]` or `'0,3'`; quotes are also accepted around each device of a list.
TOKEN = r"[0-9A-Za-z_:.-]+"
ELEMENT = rf"(?:{TOKEN}|'{TOKEN}'|\"{TOKEN}\")"
PART = re.compile(
    rf"\[{ELEMENT}(?:[,+]{ELEMENT})*\]|'{TOKEN}(?:[,+]{TOKEN})*'"
    rf"|\"{TOKEN}(?:[,+]{TOKEN})*\"|{TOKEN}(?:\+{TOKEN})*"
)
PARTS = re.compile(rf"(?:{PART.pattern})(?:,(?:{PART.pattern}))*")
# What each word means.
GPU_WORDS = {
    "all": "every device, as one subset",
    "each": "every device alone",
    "neighbours": "devices two by two, in order: 0,1 and 2,3",
    "pairs": "every possible pair of devices: 0,1 and 0,2 and 1,2 …",
    "scale": "the first 1, 2, 4, … devices, and all",
    "classes": "for every number of GPUs, one subset for each kind of link between them",
    "classes:2": "the same, pairs only",
    "best:2": "the two GPUs with the fastest links",
    "worst:2": "the two GPUs with the slowest links",
    "worst_order:4": "the GPUs of best:4 in the order that makes their ring slowest",
}
GPU_FORMS = (
    "write one subset as gpus=0,3, several as gpus=0+1,0+3, or a word: all, each, neighbours, "
    "pairs, scale, best:2, worst:2, worst_order:4, classes, classes:2"
)


def by_link(tokens: Sequence[str]) -> bool:
    """Return whether a `gpus` list is a word that needs the machine's topology."""
    if len(tokens) != 1 or tokens[0] in PLAIN_WORDS:
        return False
    return GPU_WORD.fullmatch(tokens[0]) is not None


@dataclass(frozen=True)
class Grammar:
    """How an option names ordered sets of members: `gpus=` of devices, `nodes=` of hosts."""

    option: str
    member: str  # what one is called: GPU
    members: str  # what a set of them is called: subset
    accepted: str  # a GPU id, UUID, PCI bus id or word
    forms: str  # the right forms, as the end of a sentence
    is_member: Callable[[str], bool]
    word: "re.Pattern[str]"  # that stands for sets; it stands alone
    plain: Callable[[str], bool]  # whether Hydra reads a member or word as meant without quotes
    alone_beside_sets: bool = False  # a bare member beside a set is a set of one: a,a+b

    def normalise(self, arguments: Sequence[str]) -> list[str]:
        """Rewrite every `option=…` among arguments into canonical Hydra text; keep the others."""
        start = f"{self.option}="
        texts = []
        for text in arguments:
            if text.startswith(start):
                text = start + self.canonical(text.removeprefix(start))
            texts.append(text)
        return texts

    def canonical(self, text: str) -> str:
        """Return Hydra's text: `0,3` → `[0,3]`; `0+1,0+3` → `[0,1],[0,3]`; `pairs` → `[pairs]`."""
        lists = []
        for members in self._read(text):
            texts = []
            for member in members:
                if not self.plain(member):
                    member = f"'{member}'"
                texts.append(member)
            lists.append(f"[{','.join(texts)}]")
        return ",".join(lists)

    def one_set(self, members: Sequence[str], typed: str) -> list[str]:
        """Return one set, typed or from a file, if it is one word or members that differ."""
        for member in members:
            if self.word.fullmatch(member):
                if len(members) > 1:
                    kind = "number" if member.isdecimal() else "word"
                    raise self._refused(
                        typed, f"the {kind} {member} stands alone, not inside a {self.members}"
                    )
            elif not self.is_member(member):
                span = re.fullmatch(r"(\d{1,3})[-:](\d{1,3})", member)
                if span and int(span[1]) < int(span[2]):
                    every = ",".join(map(str, range(int(span[1]), int(span[2]) + 1)))
                    raise Refused(f"{self.option}={typed}: a range; write {self.option}={every}")
                raise self._refused(typed, self._unknown(member))
            elif members.count(member) > 1:
                raise Refused(
                    f"{self.option}={typed}: {self.member} {member} is named twice; each may "
                    f"appear once in a {self.members}"
                )
        return [*members]

    def _read(self, text: str) -> list[list[str]]:
        """Return the sets that a text names; words are not expanded yet. Raises Refused."""
        function = re.match(r"(range|interval|glob|shuffle|sort|tag)\(", text)
        if function:
            raise self._refused(text, f"{function[1]}(…) is not accepted")
        # Hydra's explicit sweep: each element is a set. Elsewhere an escaped comma joins, as `+`
        # does.
        choice = re.fullmatch(r"choice\((.*)\)", text)
        inner = choice[1] if choice else text.replace("\\,", "+")
        if not PARTS.fullmatch(inner):
            reason = "has an empty or unclosed part"
            spaces = re.search(r"\s", inner)
            if not inner.strip():
                reason = f"names no {self.member}"
            elif spaces:
                reason = f"has a space or line break ({spaces[0]!r})"
            else:
                for token in re.split(r"[,+\[\]'\"]", inner):
                    if token and not self.is_member(token) and not self.word.fullmatch(token):
                        raise self._refused(text, self._unknown(token))
            raise self._refused(text, reason)
        sets, bare = [], []
        members: list[str] = []
        for part in PART.finditer(inner):
            tokens = re.findall(TOKEN, part[0])
            sets.append(tokens)
            if tokens == [part[0]]:
                bare += tokens
                members += filter(self.is_member, tokens)
        if len(members) == len(sets) > 1 and not choice:
            return [self.one_set(bare, text)]
        sets = [self.one_set(tokens, text) for tokens in sets]
        may_be_alone = choice or (self.alone_beside_sets and len(bare) < len(sets))
        # 0,1,2+3 and 0,all
        if members and not may_be_alone and (len(members) > 1 or len(bare) > 1):
            reason = "can be read in more than one way"
            if not self.alone_beside_sets:
                form = f"a {self.member} alone beside other {self.members}s is [{members[0]}]"
                reason += f" ({form})"
            raise self._refused(text, reason)
        return sets

    def _refused(self, typed: str, reason: str) -> Refused:
        return Refused(f"{self.option}={typed}: {reason}; {self.forms}")

    def _unknown(self, token: str) -> str:
        return f"{token!r} is not a {self.accepted}"


GPUS = Grammar(
    option="gpus",
    member="GPU",
    members="subset",
    accepted="GPU id, UUID, PCI bus id or word",
    forms=GPU_FORMS,
    is_member=lambda text: any(form.fullmatch(text) for form in (NUMBER, UUID, BUS_ID)),
    word=GPU_WORD,
    plain=lambda text: NUMBER.fullmatch(text) is not None or text in (*PLAIN_WORDS, "classes"),
)


def expand(word: str, members: Sequence[T]) -> list[tuple[T, ...]]:
    """Return the sets that a word names: `scale` of 8 devices is the first 1, 2, 4 and 8."""
    members = tuple(members)
    if word == "all":
        return [members]
    if word == "each":
        return [(member,) for member in members]
    if word == "neighbours":
        firsts = range(0, len(members), 2)
        return [members[max(0, min(first, len(members) - 2)) :][:2] for first in firsts]
    if word == "pairs":
        return list(itertools.combinations(members, 2))
    if word == "scale":
        powers = {1 << power for power in range(len(members).bit_length())}
        return [members[:count] for count in sorted(powers | {len(members)})]
    raise Refused(f"gpus={word}: expected a subset or {', '.join(PLAIN_WORDS)}")


COUNT = re.compile(r"[1-9][0-9]{0,3}", re.ASCII)
NODE_WORD = re.compile(rf"{COUNT.pattern}|all|each|neighbours|pairs|scale", re.ASCII)
NODE_WORDS = {
    "2": "the first two hosts; 1,2: one host, then two",
    "all": "every host, as one set",
    "each": "every host alone",
    "neighbours": "hosts two by two, in order",
    "pairs": "every possible pair of hosts",
    "scale": "the first 1, 2, 4, … hosts, and all",
}
NODE_FORMS = (
    "write one set of hosts as nodes=a,b, several as nodes=a+b,a+c, a number of hosts as nodes=2, "
    "or a word: all, each, neighbours, pairs, scale"
)
LARGEST_BYTES = 1 << 20  # of a file of hosts
MOST_HOSTS = 4096
A_FILE = "expected a file with one host per line"


def is_name(text: str) -> bool:
    """Return whether a text may be the name of a host: neither a number nor a word."""
    return (
        not text.isdecimal() and not NODE_WORD.fullmatch(text) and bool(HOST_NAME.fullmatch(text))
    )


NODES = Grammar(
    option="nodes",
    member="host",
    members="set of hosts",
    accepted="name of a host, number or word",
    forms=NODE_FORMS,
    is_member=is_name,
    word=NODE_WORD,
    plain=lambda text: NODE_WORD.fullmatch(text) is not None,
    alone_beside_sets=True,
)


@dataclass(frozen=True)
class ListedHost:
    """A host of a file, as MXNet's -H and Open MPI's hostfiles have them."""

    name: str
    slots: int | None  # the ranks that it may have; None: as many as the subset
    line: int


@functools.lru_cache(maxsize=1)
def listed_hosts(path: str) -> tuple[ListedHost, ...]:
    """Return the hosts of a file: one a line, with `slots=N` behind it or not; `#` is a comment."""
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
    hosts: dict[str, ListedHost] = {}
    for line_number, line in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        where = f"hosts={path}: line {line_number}"
        try:
            words = line.decode().partition("#")[0].split()
        except UnicodeDecodeError:
            raise Refused(f"{where}: is not text in UTF-8; {A_FILE}") from None
        if not words:
            continue
        name, *options = words
        if not is_name(name):
            hint = ""
            if ":" in name or "@" in name:
                hint = "; ports and users belong in the configuration of ssh"
            raise Refused(
                f"{where}: {name[:300]!r} is not a name of a host; expected letters, digits, '.', "
                f"'-' and '_', and not digits alone{hint}"
            )
        if name in hosts:
            raise Refused(
                f"{where}: host {name} is already in line {hosts[name].line}; expected each "
                "host once, with slots=N for its ranks"
            )
        slots = re.fullmatch(r"(?:slots=([1-9][0-9]{0,3}))?", " ".join(options), re.ASCII)
        if not slots:
            raise Refused(
                f"{where}: {' '.join(options)[:300]!r} behind host {name}; expected slots=N, or "
                "nothing"
            )
        most_ranks = int(slots[1]) if slots[1] else None
        hosts[name] = ListedHost(name, most_ranks, line_number)
        if len(hosts) > MOST_HOSTS:
            raise Refused(f"{where}: more than {MOST_HOSTS:,} hosts; expected fewer")
    if not hosts:
        raise Refused(f"hosts={path}: names no host; {A_FILE}")
    return tuple(hosts.values())


def host_sets(tokens: Sequence[str], names: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the ordered sets that a `nodes` list means, where `names` are the known hosts."""
    typed = ",".join(tokens)
    members = NODES.one_set(tokens, typed)
    if members[0] in PLAIN_WORDS:
        return expand(members[0], names)
    listed = f"{len(names)} are known: {shown(names)}"
    if not names:
        listed = "none is known"
    elif len(names) == 1:
        listed = f"1 is known: {names[0]}"
    if COUNT.fullmatch(members[0]):
        if int(members[0]) > len(names):
            raise Refused(f"nodes={typed}: wants {members[0]} hosts, and {listed}")
        return [tuple(names[: int(members[0])])]
    for name in members:
        if name not in names:
            raise Refused(f"nodes={typed}: host {name} is not known; {listed}")
    return [tuple(members)]


def shown(names: Sequence[str]) -> str:
    """Return the first names, and how many more there are."""
    text = ", ".join(names[:8])
    if len(names) > 8:
        text += f" and {len(names) - 8} more"
    return text

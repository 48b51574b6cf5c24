"""The grammar of `gpus=`: typed text becomes text that Hydra reads as meant, and words become ordered subsets.

`0,3` is ONE subset. Hydra would read it as a sweep over 0 and 3 (and `1_3` as the number 13), so the text is rewritten
before Hydra sees it: `gpus=0,3` becomes `gpus=[0,3]`, and several subsets become a sweep of lists, `gpus=[0,1],[0,3]`.
"""

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from conf.options import Refused

T = TypeVar("T")
CPU_SLOTS = 8  # for CPU workers, of a machine without GPUs
NUMBER = re.compile(r"0|[1-9][0-9]{0,3}")
UUID = re.compile(r"(GPU|MIG)-[0-9A-Za-z-]{4,64}")
BUS_ID = re.compile(r"([0-9A-Fa-f]{4,8}:)?[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-7]")
PLAIN_WORDS = ("all", "each", "pairs", "scale")
WORD = re.compile(
    r"all|each|pairs|scale|classes(:[1-9][0-9]{0,3})?|(best|worst|worst_order|advise):[1-9][0-9]{0,3}"
)
# One subset is `0+3`, `[0,3]` or `'0,3'`; quotes are also accepted around each device of a list.
TOKEN = r"[0-9A-Za-z_:.-]+"
ELEMENT = rf"(?:{TOKEN}|'{TOKEN}'|\"{TOKEN}\")"
PART = re.compile(
    rf"\[{ELEMENT}(?:[,+]{ELEMENT})*\]|'{TOKEN}(?:[,+]{TOKEN})*'|\"{TOKEN}(?:[,+]{TOKEN})*\"|{TOKEN}(?:\+{TOKEN})*"
)
PARTS = re.compile(rf"(?:{PART.pattern})(?:,(?:{PART.pattern}))*")
# What each word means.
WORDS = {
    "all": "every device, as one subset",
    "each": "every device alone",
    "pairs": "every two devices",
    "scale": "the first 1, 2, 4, … devices, and all",
    "classes": "one subset for each way in which links join GPUs, of every size",
    "classes:2": "the same, pairs only",
    "best:2": "the two GPUs with the fastest links",
    "worst:2": "the two GPUs with the slowest links",
    "advise:2": "the two GPUs that forecasts put first, by the study's cells so far; without a forecast those of best:2",
    "worst_order:4": "the GPUs of best:4 in the order that makes their ring slowest",
}
FORMS = (
    "write one subset as gpus=0,3, several as gpus=0+1,0+3, or a word: all, each, pairs, scale, best:2, worst:2, "
    "advise:2, worst_order:4, classes, classes:2"
)


def by_link(tokens: Sequence[str]) -> bool:
    """Return whether a `gpus` list is a word that needs the machine's topology."""
    return (
        len(tokens) == 1 and tokens[0] not in PLAIN_WORDS and WORD.fullmatch(tokens[0]) is not None
    )


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
        """Rewrite every `option=…` among command-line arguments into canonical Hydra text, and keep the others.

        Raises:
            Refused: the text is no set, with the right form.
        """
        start = f"{self.option}="
        return [
            start + self.canonical(text[len(start) :]) if text.startswith(start) else text
            for text in arguments
        ]

    def canonical(self, text: str) -> str:
        """Return canonical Hydra text: `0,3` → `[0,3]`; `0+1,0+3` → `[0,1],[0,3]`; `pairs` → `[pairs]`. Raises Refused."""
        sets = (
            (one if self.plain(one) else f"'{one}'" for one in members)
            for members in self._read(text)
        )
        return ",".join("[" + ",".join(members) + "]" for members in sets)

    def one_set(self, members: Sequence[str], typed: str) -> list[str]:
        """Return one set, typed or from a YAML file, if it is one word or members that differ. Raises Refused."""
        for member in members:
            if self.word.fullmatch(member):
                if len(members) > 1:
                    kind = "number" if member.isdecimal() else "word"
                    raise self._refused(
                        typed, f"the {kind} {member} stands alone, not inside a {self.members}"
                    )
            elif not self.is_member(member):
                raise self._refused(typed, self._unknown(member))
        repeated = next((member for member in members if members.count(member) > 1), None)
        if repeated is not None:
            twice = f"{self.member} {repeated} is named twice"
            raise Refused(
                f"{self.option}={typed}: {twice}; each may appear once in a {self.members}"
            )
        return [*members]

    def _read(self, text: str) -> list[list[str]]:
        """Return the sets that a text names; words are not expanded yet. Raises Refused."""
        if function := re.match(r"(range|interval|glob|shuffle|sort|tag)\(", text):
            raise self._refused(text, f"{function[1]}(…) is not accepted")
        choice = re.fullmatch(
            r"choice\((.*)\)", text
        )  # Hydra's explicit sweep: each element is a set
        inner = (
            choice[1] if choice else text.replace("\\,", "+")
        )  # an escaped comma joins, as `+` does
        if not PARTS.fullmatch(inner):
            raise self._refused(text, self._fault(inner))
        parts = [match[0] for match in PART.finditer(inner)]
        bare = [part for part in parts if re.fullmatch(TOKEN, part)]
        members = [part for part in bare if self.is_member(part)]
        if len(members) == len(parts) > 1 and not choice:
            return [self.one_set(bare, text)]
        sets = [self.one_set(re.findall(TOKEN, part), text) for part in parts]
        may_be_alone = choice or (self.alone_beside_sets and len(bare) < len(parts))
        if (
            members and not may_be_alone and (len(members) > 1 or len(bare) > 1)
        ):  # 0,1,2+3 and 0,all
            how = (
                ""
                if self.alone_beside_sets
                else f" (a {self.member} alone beside other {self.members}s is [{members[0]}])"
            )
            raise self._refused(text, f"can be read in more than one way{how}")
        return sets

    def _refused(self, typed: str, why: str) -> Refused:
        return Refused(f"{self.option}={typed}: {why}; {self.forms}")

    def _fault(self, text: str) -> str:
        """Return what is wrong with a text that is no list of sets."""
        if not text.strip():
            return f"names no {self.member}"
        if spaces := re.search(r"\s", text):
            return f"has a space or line break ({spaces[0]!r})"
        tokens = re.split(r"[,+\[\]'\"]", text)
        wrong = [
            one
            for one in tokens
            if one and not self.is_member(one) and not self.word.fullmatch(one)
        ]
        return self._unknown(wrong[0]) if wrong else "has an empty or unclosed part"

    def _unknown(self, token: str) -> str:
        return f"{token!r} is no {self.accepted}"


def _is_device(text: str) -> bool:
    return any(form.fullmatch(text) for form in (NUMBER, UUID, BUS_ID))


def _is_plain(text: str) -> bool:
    return bool(NUMBER.fullmatch(text)) or text in (*PLAIN_WORDS, "classes")


GPUS = Grammar(
    "gpus", "GPU", "subset", "GPU id, UUID, PCI bus id or word", FORMS, _is_device, WORD, _is_plain
)


def expand(word: str, members: Sequence[T]) -> list[tuple[T, ...]]:
    """Return the sets that a word of PLAIN_WORDS names: `scale` of 8 devices is the first 1, 2, 4 and 8 of them."""
    every = tuple(members)
    if word == "all":
        return [every]
    if word == "each":
        return [(member,) for member in every]
    if word == "pairs":
        return list(itertools.combinations(every, 2))
    if word == "scale":
        counts = [1 << power for power in range(len(every).bit_length())]
        return [
            every[:count] for count in dict.fromkeys([*counts, len(every)]) if count <= len(every)
        ]
    raise Refused(f"gpus={word}: accepted are a subset or {', '.join(PLAIN_WORDS)}")

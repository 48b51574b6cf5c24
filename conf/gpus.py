"""The grammar of `gpus=`: typed text becomes text that Hydra reads as meant, and words become ordered subsets.

`0,3` is ONE subset. Hydra would read it as a sweep over 0 and 3 (and `1_3` as the number 13), so the text is rewritten
before Hydra sees it: `gpus=0,3` becomes `gpus=[0,3]`, and several subsets become a sweep of lists, `gpus=[0,1],[0,3]`.
"""

import itertools
import re
from collections.abc import Sequence

from conf.options import Refused

NUMBER = re.compile(r"0|[1-9][0-9]{0,3}")
UUID = re.compile(r"(GPU|MIG)-[0-9A-Za-z-]{4,64}")
BUS_ID = re.compile(r"([0-9A-Fa-f]{4,8}:)?[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-7]")
PLAIN_WORDS = ("all", "each", "pairs", "scale")
WORD = re.compile(r"all|each|pairs|scale|classes(:[1-9][0-9]{0,3})?|(best|worst|worst_order):[1-9][0-9]{0,3}")
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
    "worst_order:4": "the GPUs of best:4 in the order that makes their ring slowest",
}
FORMS = (
    "write one subset as gpus=0,3, several as gpus=0+1,0+3, or a word: all, each, pairs, scale, best:2, worst:2, "
    "worst_order:4, classes, classes:2"
)


def by_link(tokens: Sequence[str]) -> bool:
    """Return whether a `gpus` list is a word that needs the machine's topology."""
    return len(tokens) == 1 and tokens[0] not in PLAIN_WORDS and WORD.fullmatch(tokens[0]) is not None


def normalise(arguments: Sequence[str]) -> list[str]:
    """Rewrite every `gpus=…` among command-line arguments into canonical Hydra text, and keep the others.

    Raises:
        Refused: the text is no subset, with the right form.
    """
    return [f"gpus={canonical(text[5:])}" if text.startswith("gpus=") else text for text in arguments]


def canonical(text: str) -> str:
    """Return canonical Hydra text: `0,3` → `[0,3]`; `0+1,0+3` → `[0,1],[0,3]`; `pairs` → `[pairs]`. Raises Refused."""
    return ",".join("[" + ",".join(map(_quoted, subset)) + "]" for subset in _read(text))


def _quoted(device: str) -> str:
    return device if NUMBER.fullmatch(device) or device in (*PLAIN_WORDS, "classes") else f"'{device}'"


def _read(text: str) -> list[list[str]]:
    """Return the subsets that a text names; words are not expanded yet. Raises Refused."""
    if function := re.match(r"(range|interval|glob|shuffle|sort|tag)\(", text):
        raise Refused(f"gpus={text}: {function[1]}(…) is not accepted; {FORMS}")
    choice = re.fullmatch(r"choice\((.*)\)", text)  # Hydra's explicit sweep: each element is a subset
    inner = choice[1] if choice else text.replace("\\,", "+")  # an escaped comma joins, as `+` does
    if not PARTS.fullmatch(inner):
        raise Refused(f"gpus={text}: {_fault(inner)}; {FORMS}")
    parts = [match[0] for match in PART.finditer(inner)]
    bare = [part for part in parts if re.fullmatch(TOKEN, part)]
    if len(bare) == len(parts) > 1 and not choice and all(map(_is_device, bare)):
        return [one_subset(bare, text)]
    subsets = [one_subset(re.findall(TOKEN, part), text) for part in parts]
    devices = [part for part in bare if _is_device(part)]
    if not choice and devices and (len(devices) > 1 or len(bare) > 1):  # 0,1,2+3 and 0,all
        raise Refused(f"gpus={text}: can be read in more than one way; {FORMS}")
    return subsets


def _fault(text: str) -> str:
    """Return what is wrong with a text that is no list of subsets."""
    if not text.strip():
        return "names no GPU"
    if spaces := re.search(r"\s", text):
        return f"has a space or line break ({spaces[0]!r})"
    wrong = [
        token
        for token in re.split(r"[,+\[\]'\"]", text)
        if token and not _is_device(token) and not WORD.fullmatch(token)
    ]
    return _unknown(wrong[0]) if wrong else "has an empty or unclosed part"


def _unknown(token: str) -> str:
    return f"{token!r} is no GPU id, UUID, PCI bus id or word"


def _is_device(text: str) -> bool:
    return any(form.fullmatch(text) for form in (NUMBER, UUID, BUS_ID))


def one_subset(devices: Sequence[str], typed: str) -> list[str]:
    """Return one subset, typed or from a YAML file, if it is one word or devices that differ. Raises Refused."""
    for device in devices:
        if WORD.fullmatch(device):
            if len(devices) > 1:
                raise Refused(f"gpus={typed}: the word {device} stands alone, not inside a subset; {FORMS}")
        elif not _is_device(device):
            raise Refused(f"gpus={typed}: {_unknown(device)}; {FORMS}")
    repeated = next((device for device in devices if devices.count(device) > 1), None)
    if repeated is not None:
        raise Refused(f"gpus={typed}: GPU {repeated} is named twice; each may appear once in a subset")
    return [*devices]


def expand(word: str, devices: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the subsets that a word of PLAIN_WORDS names: `scale` of 8 devices is the first 1, 2, 4 and 8 of them."""
    every = tuple(devices)
    if word == "all":
        return [every]
    if word == "each":
        return [(device,) for device in every]
    if word == "pairs":
        return list(itertools.combinations(every, 2))
    if word == "scale":
        counts = [1 << power for power in range(len(every).bit_length())]
        return [every[:count] for count in dict.fromkeys([*counts, len(every)]) if count <= len(every)]
    raise Refused(f"gpus={word}: accepted are a subset or {', '.join(PLAIN_WORDS)}")

"""The grammar of `gpus=`: text as typed becomes canonical Hydra text, and words become ordered subsets.

`0,3` is ONE subset. Hydra would read it as a sweep over 0 and 3 (and `1_3` as the number 13), so the text is rewritten
before Hydra sees it: `gpus=0,3` becomes `gpus=[0,3]`, and several subsets become a sweep of lists, `gpus=[0,1],[0,3]`.
"""

import itertools
import re
from collections.abc import Sequence

from conf.knobs import Refused

NUMBER = re.compile(r"0|[1-9]\d{0,3}")
UUID = re.compile(r"(GPU|MIG)-[0-9A-Za-z-]{4,64}")
BUS_ID = re.compile(r"([0-9A-Fa-f]{4,8}:)?[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-7]")
PLAIN_WORDS = ("all", "each", "pairs", "scale")
TOPOLOGY_WORDS = ("classes", "best", "worst")  # these need to know the links
WORD = re.compile(r"all|each|pairs|scale|classes(:[1-9]\d{0,3})?|(best|worst):[1-9]\d{0,3}")
FORMS = (
    "write one subset as gpus=0,3, several as gpus=0+1,0+3, or a word: all, each, pairs, scale, best:2, worst:2, "
    "classes, classes:2"
)


def normalise(arguments: Sequence[str]) -> list[str]:
    """Rewrite every `gpus=…` among command-line arguments into canonical Hydra text; the rest is kept as it is.

    Raises:
        Refused: the text is no subset, with the right form.
    """
    return [f"gpus={canonical(text[5:])}" if text.startswith("gpus=") else text for text in arguments]


def canonical(text: str) -> str:
    """`0,3` → `[0,3]`; `0+1,0+3` → `[0,1],[0,3]`; `pairs` → `[pairs]`. Raises Refused."""
    subsets = _read(text)
    return ",".join("[" + ",".join(_quoted(device) for device in subset) + "]" for subset in subsets)


def _quoted(device: str) -> str:
    return device if NUMBER.fullmatch(device) or WORD.fullmatch(device) and ":" not in device else f"'{device}'"


def _read(text: str) -> list[list[str]]:
    """The subsets that a text names, before words are expanded."""
    bare = text.strip().replace("\\,", ",")
    if choice := re.fullmatch(r"choice\((.*)\)", bare):  # Hydra's explicit sweep: each element is a subset
        return [_subset(part, text) for part in _split(choice[1], text)]
    if re.match(r"(range|interval|glob|shuffle|sort|tag)\(", bare):
        raise Refused(f"gpus={text}: {bare.split('(')[0]}(…) is not accepted; {FORMS}")
    whole = re.fullmatch(r"'([^']*)'|\"([^\"]*)\"", bare)
    if whole:  # one quoted text is one subset
        return [_subset(whole[1] or whole[2] or "", text)]
    parts = _split(bare, text)
    if all(_is_device(part.strip()) for part in parts):
        return [_subset(bare, text)]
    return [_subset(part, text) for part in parts]


def _split(text: str, typed: str) -> list[str]:
    """Split at the commas that are outside brackets and quotes."""
    parts = re.findall(r"(?:\[[^\[\]]*\]|'[^']*'|\"[^\"]*\"|[^,\[\]'\"])+", text)
    if not text.strip() or ",".join(parts) != text:
        raise Refused(f"gpus={typed}: names no GPU or has an empty or unclosed part; {FORMS}")
    return parts


def _is_device(text: str) -> bool:
    return any(form.fullmatch(text) for form in (NUMBER, UUID, BUS_ID))


def _subset(part: str, typed: str) -> list[str]:
    """One subset: devices joined by `,` or `+`, in brackets or quotes or neither; or one word."""
    inner = part.strip()
    while len(inner) > 1 and (inner[0], inner[-1]) in (("[", "]"), ("'", "'"), ('"', '"')):
        inner = inner[1:-1].strip()
    devices = [device.strip().strip("'\"") for device in re.split(r"[,+]", inner)]
    for device in devices:
        if not device:
            raise Refused(f"gpus={typed}: names no GPU or has an empty part; {FORMS}")
        if WORD.fullmatch(device):
            if len(devices) > 1:
                raise Refused(f"gpus={typed}: the word {device} stands alone, not inside a subset; {FORMS}")
        elif not _is_device(device):
            raise Refused(f"gpus={typed}: {device!r} is no GPU id, UUID, PCI bus id or word; {FORMS}")
    repeated = next((device for device in devices if devices.count(device) > 1), None)
    if repeated is not None:
        raise Refused(f"gpus={typed}: GPU {repeated} is named twice; each may appear once in a subset")
    return devices


def expand(word: str, devices: Sequence[int]) -> list[tuple[int, ...]]:
    """The subsets that a word of PLAIN_WORDS names among `devices`: `scale` of 8 is its first 1, 2, 4 and 8."""
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

"""Hide what looks like a secret, by name or by value, so that no record, page, store or log of ours
holds one.

A name is a secret's by a part of it in capitals, as variables have it (TOKEN, KEY, …), or by its
last word, as options have it (api_key, accessToken). A value is one by its form: an address with a
password, a token of a well-known service, a private key, `name=value` with a secret's name, or a
random word. What could be a flag or a size (true, 12) is none. Hashes, UUIDs, paths and names of
models are no random words; a secret of hexadecimal digits alone cannot be told from a hash: only
its name gives it away.
"""

import functools
import re

from conf.nccl import FIELDS, OTHERS

HIDDEN = "***"
_SETTINGS = frozenset((*(f"NCCL_{name.upper()}" for name in FIELDS), *OTHERS))
# InfiniBand's partition key (NCCL_IB_PKEY, UCX_IB_PKEY) is a setting.
_CAPITALS = re.compile(
    r"TOKEN|SECRET|PASSW|PASSPHRASE|PWD|(?<!_P)KEY|CREDENTIAL|AUTH|COOKIE|SESSION|PRIVATE|"
    r"SIGNATURE|BEARER|(?:^|_)(?:PASS|PAT|PIN|DSN|OTP)\d*$"
)
_LAST_WORD = re.compile(
    r"(?:^|[^a-z]|(?<=[a-z])(?=[A-Z]))(?i:token|secret|pass(?:word|wd|phrase|code)|pwd|"
    r"(?:api|app|access|secret|private|account|signing|ssh)[_-]?key|credentials?|auth(?:orization)?|cookie|bearer|"
    r"signature|dsn|otp)\d*$"
)
_PLAIN = re.compile(r"(?i:true|false|null|none|auto|)|-?[\d.]{1,3}|\*+")
_ADDRESS = re.compile(r"([a-z][a-z0-9+.-]{0,30}:/*)[^\s'\"]{0,300}@(?!\d+(?:\s|$))", re.IGNORECASE)
_QUERY = re.compile(
    r"([?&;][^=&\s]{0,40}(?:token|passw|pwd|secret|key|sig|cred)[^=&\s]{0,40}=)[^&\s'\"]+",
    re.IGNORECASE,
)
_TOKEN = re.compile(
    r"\b(?:(?:AKIA|ASIA)[0-9A-Z]{16}|gh[opusr]_\w{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}"
    r"|hf_[A-Za-z0-9]{16,}|sk-[\w-]{16,}|(?:sk|rk|pk)_(?:live|test)_\w{16,}|whsec_\w{16,}"
    r"|xox[a-z]-[\w-]{8,}|xapp-[\w-]{8,}|nvapi-[\w-]{16,}|AIza[\w-]{30,}|ya29\.[\w-]{16,}"
    r"|pypi-[\w-]{30,}|npm_[A-Za-z0-9]{30,}|dapi[0-9a-f]{32}|dop_v1_\w{20,}|shpat_\w{20,}"
    r"|SG\.[\w-]{16,}\.[\w-]{16,}|dckr_pat_[\w-]{16,}|hvs\.[\w-]{16,}|\d{8,10}:AA[\w-]{30,}"
    r"|eyJ[\w-]{8,300}\.[\w-]{8,}\.[\w-]*)"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----(?:.*?-----END [A-Z ]*PRIVATE KEY-----|.*)",
    re.DOTALL,
)
# `name=value`, `"name": "value"`, `name: value`; `/etc/passwd: no such …` is about a file
_NAMED = re.compile(r"(?<![\w.-])(?<!/etc/)([A-Za-z_-][\w.-]*)[\"']?(?:\s?=\s?|\s*:\s+|:(?=[\"']))")
_VALUE = re.compile(r"\"[^\"]*\"|'[^']*'|(?:Bearer |Basic )?[^\s,;&\"'\])}]*[^\s,;&\"'\])}:]")
_WORD = re.compile(r"[A-Za-z0-9+/_-]{20,}={0,2}")
_HASH = re.compile(r"(?<![A-Za-z0-9])(?:[0-9a-f]+|[0-9A-F]+)(?![A-Za-z0-9])")


@functools.lru_cache(maxsize=4096)  # the cells of a sweep have the same few thousand texts
def is_secret(name: str, value: str) -> bool:
    """Return whether a variable or an option looks like a secret. No setting of NCCL's does."""
    return _is_named_so(name, value) or without_secrets(value) != value


def without_secrets(text: str) -> str:
    """Return a text with `***` for everything that looks like a secret."""
    text = _TOKEN.sub(HIDDEN, without_credentials(text))
    parts = []
    end = 0  # of what was hidden last
    for match in _NAMED.finditer(text):
        if match.start() < end or not _is_name(match[1]):
            continue
        value = _VALUE.match(text, match.end())
        if value and not _PLAIN.fullmatch(value[0].strip("'\"")):
            parts += [text[end : match.end()], HIDDEN]
            end = value.end()
    text = "".join([*parts, text[end:]])
    return _WORD.sub(lambda match: HIDDEN if _is_random(match[0]) else match[0], text)


def argument_without_secrets(argument: str) -> str:
    """Return an argument `option=value`, with `***` for a value that looks like a secret."""
    name, equals, value = argument.partition("=")
    if equals and _is_named_so(name, value):
        return f"{name}={HIDDEN}"
    return without_secrets(argument)


def without_credentials(text: str) -> str:
    """Return a text with *** for users, passwords and secret query values of every URI."""
    return _QUERY.sub(rf"\1{HIDDEN}", _ADDRESS.sub(rf"\1{HIDDEN}@", text))


def configuration_without_secrets(text: str) -> str:
    """Return a configuration file of NCCL's with `***` for every secret value."""
    lines = []
    for line in text.splitlines(keepends=True):
        name, _, value = line.partition("=")
        if is_secret(name.strip(), value.strip()):
            line = f"{name}={HIDDEN}\n"
        lines.append(line)
    return "".join(lines)


def _is_named_so(name: str, value: str) -> bool:
    return _is_name(name) and not _PLAIN.fullmatch(value)


def _is_name(name: str) -> bool:
    name = name.rpartition(".")[2]
    return name not in _SETTINGS and bool(_CAPITALS.search(name) or _LAST_WORD.search(name))


def _is_random(word: str) -> bool:
    """Return whether a word changes between capitals, small letters and digits as random ones do.

    Parts that are hexadecimal do not count: they are hashes. Limits: no text of the committed
    studies passes them, and of random words of 20 to 40 characters 9 in 10 do.
    """
    letters = re.sub(r"[^A-Za-z0-9]", "", _HASH.sub("", word))
    kinds = re.sub(r"[0-9]", "0", re.sub(r"[a-z]", "a", re.sub(r"[A-Z]", "A", letters)))
    share = len(re.findall(r"(.)(?!\1)(?=.)", kinds)) / max(1, len(kinds) - 1)
    if len(set(kinds)) == 3:
        return len(letters) >= 20 and share > 0.4
    least = 0.25 if "0" in kinds else 0.4
    return (
        len(set(kinds)) == 2 and len(letters) >= 24 and word.rstrip("=").isalnum() and share > least
    )

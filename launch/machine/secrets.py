"""Tell what looks like a secret, by its name or by its value, so that no record, page, store or log
of ours holds one.

A name looks like a secret by a part of it (TOKEN, KEY, …). A value does by its form: an address
with a password, a token of a well-known service, a private key, or a random word: 20 or more
letters and digits in a row that change between capitals, small letters and digits at more than 2 of
5 places. Hashes, UUIDs and paths do not; neither do words of several capitalised parts. A secret of
lower-case hexadecimal digits alone cannot be told from a hash: only its name gives it away.
"""

import re

from benchmarks.record.safe_text import one_line
from conf.nccl import FIELDS, OTHERS

# InfiniBand's partition key (NCCL_IB_PKEY, UCX_IB_PKEY) is a setting.
_NAME = re.compile(
    r"TOKEN|SECRET|PASSW|PASSPHRASE|PWD|(?<!_P)KEY|CREDENTIAL|AUTH|COOKIE|SESSION|PRIVATE|"
    r"SIGNATURE|BEARER",
    re.IGNORECASE,
)
_SETTINGS = frozenset((*(f"NCCL_{name.upper()}" for name in FIELDS), *OTHERS))
# Words of an option's name; `benchmark.keys` is an option of ours.
_OPTION = re.compile(
    r"(?:^|[._-])(?:token|secret|password|passwd|passphrase|api_?key|key|credentials?|cookie)$",
    re.IGNORECASE,
)
_ADDRESS = re.compile(r"://[^/\s]*@")
_TOKEN = re.compile(
    r"\b(?:(?:AKIA|ASIA)[0-9A-Z]{16}|gh[opusr]_\w{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}"
    r"|hf_[A-Za-z0-9]{16,}|sk-[\w-]{16,}"
    r"|xox[a-z]-[\w-]{8,}|nvapi-[\w-]{16,}|AIza[\w-]{30,}|pypi-[\w-]{30,}|npm_[A-Za-z0-9]{30,}"
    r"|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*)"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----(?:.*?-----END [A-Z ]*PRIVATE KEY-----|.*)",
    re.DOTALL,
)
_WORD = re.compile(r"[A-Za-z0-9+]{20,}")


def secret_name(name: str) -> bool:
    """Tell whether a variable's name looks like that of a secret. No setting of NCCL's does."""
    return name not in _SETTINGS and _NAME.search(name) is not None


def secret_value(value: str) -> bool:
    """Tell whether a value looks like a secret, by its form."""
    if _ADDRESS.search(value) or _TOKEN.search(value):
        return True
    return any(map(_is_random, _WORD.findall(value)))


def is_secret(name: str, value: str) -> bool:
    """Tell whether an environment variable looks like a secret."""
    return secret_name(name) or secret_value(value)


def without_secrets(text: str) -> str:
    """Return a text in which `***` stands for everything that looks like a secret by its form."""

    def stars(match: re.Match[str]) -> str:
        if _is_random(match[0]):
            return "***"
        return match[0]

    text = _TOKEN.sub("***", without_credentials(text))
    return _WORD.sub(stars, text)


def argument_without_secrets(argument: str) -> str:
    """Return an argument `option=value`, with `***` for a value that looks like a secret."""
    name, equals, _ = argument.partition("=")
    if equals and _OPTION.search(name):
        return f"{name}=***"
    return without_secrets(argument)


def redact(sentence: str) -> str:
    """Return a sentence as one line for terminals and logs: without secrets, controls escaped."""
    return one_line(without_secrets(sentence))


def without_credentials(text: str) -> str:
    """Return a text with *** for users, passwords and secret query values of every URI."""
    text = re.sub(r"([a-z][a-z0-9+.-]*:/*)[^\s'\"]*@", r"\1***@", text, flags=re.IGNORECASE)
    secret = r"([?&;][^=&\s]*(?:token|passw|pwd|secret|key|sig|cred)[^=&\s]*=)[^&\s'\"]+"
    return re.sub(secret, r"\1***", text, flags=re.IGNORECASE)


def configuration_without_secrets(text: str) -> str:
    """Return a configuration file of NCCL's with `***` for every secret value."""
    lines = []
    for line in text.splitlines(keepends=True):
        name, _, value = line.partition("=")
        if is_secret(name.strip(), value):
            line = f"{name}=***\n"
        lines.append(line)
    return "".join(lines)


def _is_random(word: str) -> bool:
    changes = -1
    kinds = [""]
    for letter in word:
        kind = "0"
        if letter.isupper():
            kind = "A"
        elif letter.islower():
            kind = "a"
        if kind != kinds[-1]:
            changes += 1
        kinds.append(kind)
    return len(set(kinds[1:])) == 3 and changes > 0.4 * (len(word) - 1)

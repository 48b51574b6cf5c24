"""Hostile requests, drawn from a grammar: command lines and the YAML files that they name.

What is drawn is at most foolish, never dangerous to run: a `_target_` that is obeyed would make a
file called `obeyed`.
"""

import dataclasses
import json
import random
from pathlib import Path

from hypothesis import strategies as some

from conf import groups
from conf.schema import Config
from launch.help import option_rows

OBEYED = "obeyed"  # a file of this name is proof that something was executed
MODULE = f"""\
from pathlib import Path
Path(__file__).with_name("{OBEYED}").touch()
def build(*a, **k):
    return 1
"""

GIVEN = json.loads((Path(__file__).parent / "data" / "hostile_requests.json").read_text())
OPTIONS, FLAGS, WORDS = GIVEN["options"], GIVEN["flags"], [*GIVEN["words"], "9" * 5000]
LONG = ["a" * 100_000, "[" * 100_000, "{" * 50_000 + "}" * 50_000, "1," * 50_000 + "1"]
LONG += ["'" * 100_001, "\\" * 99_999, "é" * 100_000, "a=" * 50_000, "${" * 33_000]
LONG += ["0+1," * 25_000 + "0", " " * 100_000, "-" * 100_000, "a." * 50_000, "(" * 100_000]


@dataclasses.dataclass(frozen=True)
class Request:
    """A command line, and the files that lie in its `--config-dir study`, by path."""

    arguments: tuple[str, ...]
    files: dict[str, bytes] = dataclasses.field(default_factory=dict)


WORD, OPTION = some.sampled_from(WORDS), some.sampled_from(OPTIONS)
JOINED = some.builds(
    str.join,
    some.sampled_from(("", ",", "+", " ", "/", ":")),
    some.lists(WORD, min_size=1, max_size=3),
)
VALUE = JOINED | JOINED | JOINED | some.sampled_from(LONG)
SIGN = some.sampled_from(("", "+", "++", "~", "+~"))
PACKAGE = some.sampled_from(("", "@model", "@_global_", "@:x", "@a:b"))
EQUALS = some.sampled_from(("=", "", "==", " = ", ":"))
ONLY_THE_VALUE_IS_ODD = some.builds("{}={}".format, OPTION, WORD)  # it comes further
ARGUMENT = (
    ONLY_THE_VALUE_IS_ODD
    | ONLY_THE_VALUE_IS_ODD
    | some.builds("{}{}{}{}{}".format, SIGN, OPTION, PACKAGE, EQUALS, VALUE)
    | VALUE
    | some.sampled_from(FLAGS)
)
COMMANDS = some.builds(Request, some.lists(ARGUMENT, min_size=1, max_size=3).map(tuple))


# --- study YAMLs

STRATEGY = """\
name: mine
_target_: obey.build
size: 4
text: auto
accepts:
  size: {least: 1, most: 8, whole: true}
  text: {words: [auto, a]}
auto:
  text: {cuda: a, cpu: a}
"""
EXPERIMENT = (
    "# @package _global_\ndefaults:\n  - override /strategy: none\nstudy: mine\ngpus: [0]\n"
)


def _bomb(levels):
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    for n in range(1, levels):
        lines.append(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]")
    return "\n".join(lines)


def _merges():
    lines = ["a0: &a0 {x: 1}"]
    for n in range(1, 12):
        lines.append(f"a{n}: &a{n}\n  <<: [{', '.join([f'*a{n - 1}'] * 9)}]")
    return "\n".join(lines)


DEEP = ["[" * 300, "[" * 5000, "{b: " * 300 + "1" + "}" * 300, "[" * 900 + "]" * 900, "9" * 6000]
SNIPPETS = [_bomb(6), _bomb(9), _bomb(30), _merges(), *GIVEN["snippets"]]
SNIPPETS += [f"a: {nested}" for nested in DEEP]
SNIPPETS += ["\n".join(" " * n + "a:" for n in range(300)), "a: |\n  " + "x" * 100_000]
SNIPPETS.append("_target_: " + "a." * 2000 + "b")
RAW = [b"", b"\0" * 100, b"\xff\xfe\x00", b"\xef\xbb\xbfname: mine\n", bytes(range(256))]
RAW += ["name: mine\n".encode("utf-16"), b"\x1f\x8b\x08", b"name: mine\r\n", b"a: \x80"]
RAW += [b"\x1b[2J: 1\n", b"x" * (2 << 20), b"a: 1\n" * 50_000, b"[1," * 2000]
NAMES = ("mine", "nccl_allreduce", "\x1b[2J", "a b", "-x", ".x", "..", "é")


SNIPPET = (
    some.sampled_from(SNIPPETS)
    | some.builds("{}: {!r}".format, some.sampled_from(("study", "output_dir")) | OPTION, WORD)
    | some.builds("tracking:\n  uri: {!r}".format, WORD)
    | some.builds("model:\n  library: python\n  builder: {!r}".format, WORD)
)


@some.composite
def _studies(draw):
    """A strategy, benchmark, model or experiment of its own, damaged by a snippet or two."""
    group = draw(some.sampled_from(("strategy", "experiment", "benchmark", "model")))
    name = draw(some.sampled_from(NAMES))
    text = EXPERIMENT if group == "experiment" else STRATEGY
    for snippet in draw(some.lists(SNIPPET, min_size=1, max_size=2)):
        key = snippet.partition(":")[0]
        kept = [line for line in text.splitlines() if not line.startswith(f"{key}:")]
        text = "\n".join([*kept, snippet, ""])
    content = draw(some.just(text.encode("utf-8", "surrogatepass")) | some.sampled_from(RAW))
    sign = "+" if group == "experiment" else draw(some.sampled_from(("", "+")))
    more = draw(some.lists(ARGUMENT, max_size=1))
    arguments = ["--config-dir=study", f"{sign}{group}={name}", *more]
    return Request(tuple(arguments), {f"{group}/{name}.yaml": content})


REQUESTS = COMMANDS | COMMANDS | _studies()


# --- every option with every kind of wrong value

WRONG = {
    "a word": "wrong", "true": "true", "nothing": "", "null": "null", "NaN": "nan", "infinite": "-inf",
    "huge": "9" * 40, "tiny": "1e-400", "negative": "-1", "a fraction": "0.5", "nested": "[[a]]",
    "a list": "[1,2]", "a mapping": "{a: 1}", "several": "1,2", "a control": "'a\x1b[2Jb'",
    "a path": "../../etc/passwd", "a device": "/dev/zero", "a folder": "/etc", "absent": "/nosuch/file",
    "long": "a" * 3000, "a port": "http://a:99999", "a choice": "../model/resnet50.yaml",
}  # fmt: skip
STRANGE_NAMES = (
    "{}x=1", "x.{}=1", "{}.x=1", "+{}.y.z=1", "hydra.{}=1", "NCCL_{}=1", "--{}=1", "{}",
)  # fmt: skip


def wrong_requests(count, seed):
    """Return (option, arguments) of so many command lines with one wrong value or name each."""
    options = [(row[0], ()) for row in option_rows(Config, "")]
    for group in groups.WITH_RULES:
        for name in groups.choices(group):
            chosen = groups.choice(group, name).options
            options += [(f"{group}.{option}", (f"{group}={name}",)) for option in chosen]
    lines = []
    for option, chosen in options:
        for value in WRONG.values():
            lines.append((option, (*chosen, f"{option}={value}")))
        for form in STRANGE_NAMES:
            lines.append((None, (*chosen, form.format(option))))
    return random.Random(seed).sample(lines, count)

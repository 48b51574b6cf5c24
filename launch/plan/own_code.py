"""Refuse code of the user's own that cannot be called as it will be: one process imports it before
any rank starts.

`python -m launch.plan.own_code` is that process: it reads a JSON list of calls, and prints the
first reason why one of them cannot be made. The launching process imports neither torch nor a
model.
"""

import contextlib
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.agent.processes import with_absolute_path
from conf import groups
from conf.cell import SAMPLES, Cell
from conf.groups import RULES
from conf.options import Refused, closest
from conf.targets import locate, source_file, split
from launch.engines.environment import ROOT

STRATEGY, OWN_MODEL = "trainers.strategy.Strategy", "trainers.batches.OwnModel"


@dataclass(frozen=True)
class Call:
    """A call of the user's own code."""

    field: str  # where its name was read
    target: str  # dotted name
    keywords: tuple[str, ...] | None = None  # None: not looked at
    options: str = ""  # where further keywords come from
    base: str = ""  # dotted name of the class that a class is derived from; empty: any


# --- in the launching process
# ------------------------------------------------------------------------------------------


def refuse_wrong_code(cells: Sequence[Cell]) -> None:
    """Refuse cells whose model, loader, strategy or benchmark of the user's own cannot be called,
    or lacks a method.

    Raises:
        Refused: names the field, the value and what is accepted.
    """
    calls = list(dict.fromkeys(call for cell in cells for call in own_calls(cell)))
    if not calls:
        return
    answer = subprocess.run(
        [sys.executable, "-m", "launch.plan.own_code"],
        cwd=ROOT,
        env=with_absolute_path(os.environ),
        input=json.dumps([asdict(call) for call in calls]),
        capture_output=True,
        text=True,
        check=False,
    )
    if answer.returncode != 0:
        names = ", ".join(f"{call.field}={call.target}" for call in calls)
        reason = (answer.stderr.strip().splitlines() or [f"exit status {answer.returncode}"])[-1]
        raise Refused(f"{names}: the process that imports it ends ({reason})")
    sentence = json.loads(answer.stdout)
    if sentence:
        raise Refused(sentence)


def own_calls(cell: Cell) -> Iterator[Call]:
    """Yield what a rank or a report will call of the user's own code."""
    targets = {group: rules["target"] for group, rules in cell.declared.items()}
    if "model" in targets:
        keywords, base = [*cell.model.options], OWN_MODEL
        if cell.model.inputs != SAMPLES:
            keywords, base = ["classes", "channels", *keywords], ""
        yield Call("model.builder", targets["model"], tuple(keywords), "model.options", base)
    if "data" in targets:
        keywords = ["batch_size", "rank", "world_size", "seed", *cell.data["options"]]
        yield Call("data.loader", targets["data"], tuple(keywords), "data.options")
    if "strategy" in targets and not _is_ours("strategy", cell):
        keywords = [name for name in cell.strategy if name != "name"]
        field = f"strategy={cell.strategy['name']}: _target_"
        yield Call(field, targets["strategy"], tuple(keywords), "the options of its YAML", STRATEGY)
    if "benchmark" in targets and not _is_ours("benchmark", cell):
        field = f"benchmark={cell.benchmark['name']}"
        yield Call(f"{field}: _target_", targets["benchmark"])
        for name in ("derive", "section"):
            if name in cell.declared["benchmark"]:
                yield Call(f"{field}: code.{name}", cell.declared["benchmark"][name])


def _is_ours(group: str, cell: Cell) -> bool:
    return groups.choice(group, getattr(cell, group)["name"]).is_ours


# --- in the process that imports the code
# ------------------------------------------------------------------------------


def refusal(call: Call) -> str:
    """Return why a call cannot be made, naming field, name and what is accepted; empty where it
    can."""
    path = source_file(call.field, call.target)
    module, name = split(call.target)
    try:
        target = locate(call.target)
    except (Exception, SystemExit) as error:
        reason = f"cannot be imported ({type(error).__name__}: {error})"
        if module in sys.modules and not hasattr(sys.modules[module], name):
            reason = f"{path} defines no {name}"
    else:
        reason = _missing_method(target, call.base) or _wrong_keyword(target, call)
    return f"{call.field}={call.target}: {reason}" if reason else ""


def _missing_method(target: Any, base: str) -> str:
    """Return what a class lacks to be one that is derived from `base`; empty for a function."""
    if not base or not inspect.isclass(target):
        return ""
    seam: Any = locate(base)
    name, short = target.__name__, seam.__name__
    if not issubclass(target, seam):
        return (
            f"{name} is no {short}; accepted is a subclass of {base}, or a function that "
            "returns one"
        )
    abstract = [name for name in vars(seam) if name in seam.__abstractmethods__]
    for method in abstract:
        if method in getattr(target, "__abstractmethods__", ()):
            return f"{name} has no {method}; a subclass of {short} defines {', '.join(abstract)}"
    return ""


def _wrong_keyword(target: Any, call: Call) -> str:
    """Return which keyword a function or a class does not take, or which argument it needs beside
    them."""
    if call.keywords is None:
        return ""
    try:
        parameters = inspect.signature(target).parameters
    except (TypeError, ValueError):  # written in C
        return ""
    named = {}
    takes_any = False
    for name, parameter in parameters.items():
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            named[name] = parameter
        takes_any = takes_any or parameter.kind is parameter.VAR_KEYWORD
    arguments = ", ".join(f"{keyword}=…" for keyword in call.keywords)
    called_as = f"is called as {split(call.target)[1]}({arguments})"
    for keyword in call.keywords:
        if keyword not in named and not takes_any:
            hint = closest(keyword, RULES)
            if keyword == "classes":
                hint = "; a model that makes its own batches is asked for with model.inputs=samples"
            return f"takes no {keyword}, and {called_as}{hint}"
    for name, parameter in named.items():
        if parameter.default is parameter.empty and name not in call.keywords:
            return f"needs {name}, and {called_as}; add it to {call.options}"
    return ""


def main() -> None:
    """Print the first refusal of the calls on the standard input as JSON; null where there is
    none."""
    with contextlib.redirect_stdout(sys.stderr):  # imported code may print
        reasons = [refusal(Call(**call)) for call in json.load(sys.stdin)]
    print(json.dumps(next(filter(None, reasons), None)))


if __name__ == "__main__":
    main()

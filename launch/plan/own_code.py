"""Refuse code of the user's own that cannot be called. A child process, `python -m
launch.plan.own_code`, imports it and inspects its signature: the launching process imports neither
torch nor a model."""

import contextlib
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from benchmarks.agent.processes import with_absolute_path
from conf import groups
from conf.cell import SAMPLES, Cell
from conf.options import Refused
from conf.targets import locate, source_file, split
from launch.machine.facts import ROOT

STRATEGY, OWN_MODEL = "trainers.strategy.Strategy", "trainers.batches.OwnModel"
EVERY_MODEL = ("classes", "channels")
EVERY_LOADER = ("batch_size", "rank", "world_size", "seed")


class Call(NamedTuple):
    """A call of the user's own code."""

    field: str  # where its name was read
    target: str  # dotted name
    keywords: Sequence[str] | None = None  # None: not looked at
    base: str = ""  # dotted name of the class that a class is derived from; empty: any


def refuse_wrong_code(cells: Sequence[Cell]) -> None:
    """Refuse own models, loaders, strategies and benchmarks that cannot be called."""
    calls: dict[str, Call] = {}
    for cell in cells:
        for call in own_calls(cell):
            calls[str(call)] = call
    if not calls:
        return
    command = [sys.executable, "-m", "launch.plan.own_code", json.dumps(list(calls.values()))]
    environment = with_absolute_path(os.environ)
    child = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if child.returncode or child.stdout:
        reason = child.stderr.strip().rpartition("\n")[2] or f"exit status {child.returncode}"
        names = ", ".join([f"{call.field}={call.target}" for call in calls.values()])
        ends = f"{names}: the process that imports it ends ({reason})"
        raise Refused(child.stdout or ends)


def own_calls(cell: Cell) -> Iterator[Call]:
    """Yield what a rank or a report will call of the user's own code."""
    for group, rules in cell.declared.items():
        keywords, base = None, ""
        if group == "model":
            field, keywords = "model.builder", [*EVERY_MODEL, *cell.model.options]
            if cell.model.inputs == SAMPLES:
                keywords, base = [*cell.model.options], OWN_MODEL
        elif group == "data":
            field, keywords = "data.loader", [*EVERY_LOADER, *cell.data["options"]]
        else:
            options = getattr(cell, group)
            if groups.choice(group, options["name"]).is_ours:
                continue
            field = f"{group}={options['name']}: _target_"
            if group == "strategy":
                keywords, base = [name for name in options if name != "name"], STRATEGY
            for name in {"derive", "section"} & rules.keys():
                yield Call(f"{group}={options['name']}: code.{name}", rules[name])
        yield Call(field, rules["target"], keywords, base)


def refusal(call: Call) -> str:
    """Return why a call cannot be made; empty where it can. It imports the code."""
    path = source_file(call.field, call.target)
    module, name = split(call.target)
    where = f"{call.field}={call.target}"
    try:
        target = locate(call.target)
    except (Exception, SystemExit) as error:
        if module in sys.modules and not hasattr(sys.modules[module], name):
            return f"{where}: {path} defines no {name}"
        return f"{where}: cannot be imported ({type(error).__name__}: {error})"
    if call.base and inspect.isclass(target) and not issubclass(target, locate(call.base)):
        return (
            f"{where}: {name} is not a subclass of {call.base}; expected one, or a function that "
            "returns one"
        )
    missing = getattr(target, "__abstractmethods__", ())
    if call.base and missing:
        return f"{where}: {name} has no {', '.join(sorted(missing))}, as {call.base} asks for"
    try:
        if call.keywords is not None:
            inspect.signature(target).bind(**dict.fromkeys(call.keywords))
    except TypeError as error:
        arguments = ", ".join([f"{keyword}=…" for keyword in call.keywords or ()])
        hint = ""
        if "'classes'" in str(error):
            hint = "; a model that makes its own batches is asked for with model.inputs=samples"
        return f"{where}: is called as {name}({arguments}): {error}{hint}"
    except ValueError:
        return ""  # it is written in C
    return ""


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):  # imported code may print
        reason = ""
        for call in json.loads(sys.argv[1]):
            reason = reason or refusal(Call(*call))
    print(reason, end="")

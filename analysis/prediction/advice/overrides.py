"""The command that measures an option: the overrides of a measured cell that is most like it, with what the option changes."""

import shlex
from collections.abc import Iterator, Mapping, Sequence

from analysis.prediction.advice.options import Candidate
from analysis.prediction.cells import options_of, workload_of
from analysis.study.study import Runs, Study

# What an option says itself, or what changes no cell: not copied from another cell's command.
_SAID = ("gpus", "nodes", "batch_size", "global_batch_size", "study", "output_dir", "repeats", "seed", "resume", "dry_run",
         "noise_pairs", "waterfall", "topology", "experiment", "predict", "model", "strategy", "tracking.uri")  # fmt: skip
_SAID_GROUPS = ("nccl.", "strategy.", "profiler")


def command(study: Study, option: Candidate, runs_so_far: int) -> str:
    """Return `python launch.py …` that measures a cell once more in its study."""
    return shlex.join(["python", "launch.py", *overrides(study, option, runs_so_far)])


def overrides(study: Study, option: Candidate, runs_so_far: int) -> list[str]:
    """Return the overrides of one cell, in the order in which people write them."""
    question = option.question
    like = _likest(study, option)
    found = [f"gpus={','.join(map(str, question.members))}", f"model={question.workload.model}"]
    found += [
        f"strategy={question.strategy}",
        *_options(like, option),
        f"batch_size={question.batch_size}",
    ]
    found += [f"nccl.{name.removeprefix('NCCL_').lower()}={value}" for name, value in option.nccl]
    found += _kept(like)
    if runs_so_far:
        found.append(f"repeats={runs_so_far + 1}")
    if study.folder is not None:
        found += [f"study={study.folder.resolve().name}", f"output_dir={study.folder.parent}"]
    return found


def _likest(study: Study, option: Candidate) -> Runs:
    """Return runs of the workload, with the same strategy and options if there are any."""
    alike = [
        one
        for one in study.runs
        if one.trains and workload_of(one.request, one.records[0].model) == option.question.workload
    ]
    return next(
        (
            one
            for one in reversed(alike)
            if options_of(one.cell.strategy) == option.question.options
        ),
        alike[-1],
    )


def _typed(runs: Runs) -> Iterator[tuple[str, str]]:
    """Yield what was typed for a cell; of several values the one that it has."""
    for text in runs.records[-1].overrides:
        name, equals, value = text.lstrip("+").partition("=")
        if equals and "," in value and not value.startswith(("[", "{", "'", '"')):
            value = _asked(runs.request, name)
        if equals and value:
            yield name, value


def _asked(request: Mapping[str, str], name: str) -> str:
    return request.get(name, request.get(f"{name}.name", ""))


def _options(like: Runs, option: Candidate) -> list[str]:
    """Return what was typed of the strategy's options, where the measured cell has the same."""
    if options_of(like.cell.strategy) != option.question.options:
        return []
    return [f"{name}={value}" for name, value in _typed(like) if name.startswith("strategy.")]


def _kept(like: Runs) -> Sequence[str]:
    kept = [
        one for one in _typed(like) if one[0] not in _SAID and not one[0].startswith(_SAID_GROUPS)
    ]
    return [f"{name}={value}" for name, value in kept]

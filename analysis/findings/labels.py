"""Labels: what findings and reports call cells. Nothing decides by a label; keys decide (Runs.key), labels are made last."""

import json
import re
from collections.abc import Sequence
from typing import Any

from analysis.findings import provenance
from analysis.findings.model import Member
from analysis.findings.runs import Runs
from analysis.findings.study import Study
from conf.cell import folded

BETWEEN = " · "  # the parts of a name
_GPU = re.compile(r"\bGPU(?=s?\b)")


def label(study: Study, runs: Runs, without: Sequence[str] = ()) -> str:
    """Return a label with only what varies in the study; if nothing varies, model · strategy, or the benchmark."""
    words = parts(study, runs, without)
    if not words and not runs.trains:
        return str(runs.cell.benchmark["name"])
    return BETWEEN.join(words) or f"{runs.cell.model.name}{BETWEEN}{runs.strategy}"


def parts(study: Study, runs: Runs, without: Sequence[str] = ()) -> list[str]:
    """Return the parts of a label: the options in which runs differ from others of the study, then where they ran."""
    options = [worded(name, runs.request[name]) for name in study.distinguishing(runs, without)]
    for name in study.telling_provenance:
        value = provenance.worded(runs.provenance.get(name))
        options.append(value if name == provenance.STUDY else f"{name} {value}")
    return options


def side_label(study: Study, runs: Runs, differing: Sequence[str], worded_difference: str) -> str:
    """Return the label of one side of a comparison: its GPUs, its label, and the NCCL setting that it left alone."""
    if differing[0].startswith("nccl.") and differing[0] not in runs.request:
        words = [*parts(study, runs), f"{worded_difference.removeprefix('NCCL_')} untouched"]
    else:
        words = [label(study, runs)]
    return BETWEEN.join([gpu_list(runs.gpus), *words])


def worded(name: str, value: str) -> str:
    """Return one option of a request for people: `compile`, `batch 256`, `P2P_LEVEL=LOC`, `comm_hook=bf16`."""
    words = {
        "batch_size": "batch",
        "global_batch_size": "global batch",
        "server_gpus": "server_gpus",
        "gpus": "gpus",
    }
    if name in words:
        return f"{words[name]} {value.strip('[]')}"
    if name in ("model.name", "strategy.name", "optimizer.name", "precision", "optimize", "benchmark.name", "device"):
        return value
    if name == "hosts":
        return f"hosts {value}" if value else "this machine"
    if name == "server_hosts":
        return f"servers on {folded(json.loads(value)) if value.startswith('[') else value}"
    if name == "data":
        data: dict[str, Any] = json.loads(value) if value.startswith("{") else {"name": value, "options": {}}
        return " ".join([f"data={data['name']}", *(f"{option}={one}" for option, one in data["options"].items())])
    if name == "model.image_size":
        return f"{value} px"
    return f"{name.rpartition('.')[2].removeprefix('NCCL_')}={value}"


def gpu_ids(gpus: Sequence[Member]) -> str:
    """Return `0,3`, in rank order; with hosts `a · 0,3`, `a+b · 2 × 0,3`, or `a:0,b:3` where the hosts have other GPUs."""
    return _on_hosts(gpus, "")


def gpu_list(gpus: Sequence[Member]) -> str:
    """Return `gpus 0,3`, with hosts `a+b · 2 × gpus 0,3`."""
    return _on_hosts(gpus, "gpus ")


def _on_hosts(gpus: Sequence[Member], word: str) -> str:
    hosts: dict[str, list[str]] = {}
    for gpu in gpus:
        host, _, number = str(gpu).rpartition(":")
        hosts.setdefault(host, []).append(number)
    ids = [",".join(own) for own in hosts.values()]
    if len(set(ids)) > 1:
        return word + ",".join(map(str, gpus))
    if not ids or "" in hosts:
        return word + "".join(ids)
    return f"{folded([*hosts])}{BETWEEN}{f'{len(hosts)} × ' * (len(hosts) > 1)}{word}{ids[0]}"


def unit(device: str) -> str:
    """Return what one member of a subset is called: a GPU, or a CPU worker of a machine without GPUs."""
    return "GPU" if device == "cuda" else "CPU worker"


def of_unit(words: str, unit: str) -> str:
    """Return words about GPUs as words about CPU workers, where `unit` is not `GPU` or `GPUs`."""
    return words if unit.startswith("GPU") else _GPU.sub("CPU worker", words)


def several(names: Sequence[str]) -> str:
    """Return the first of several names, and how many more there are."""
    rest = len(names) - 1
    return names[0] + (f" and {rest} more {'cell' if rest == 1 else 'cells'}" if rest else "")

"""The studies that are compared: the cells of each from one machine, their names, what differs."""

import dataclasses
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from analysis.study.names import BETWEEN
from analysis.study.noise_floor import of_other_studies
from analysis.study.provenance import (
    Machines,
    first_gpu,
    gpus_of,
    hardware,
    identities_of,
    inherited,
    short_hardware,
)
from analysis.study.study import Study, refuse_no_folder, unreadable_files
from benchmarks.record import CellFolder, Record, read_study, record_paths
from conf.cell import compress_hosts
from conf.options import to_text
from conf.targets import split

LABELLED = re.compile(r"([^=/\\]+)=(.+)", re.DOTALL)  # LABEL=FOLDER
ATTEMPT = re.compile(r"attempt-\d+")
Check = Callable[[Record, CellFolder], Record]
MOST = 3  # values of one fact that are named
NOT_KNOWN = "not known"
CODE = "code: "  # before the user's own file, of which records have the hash
GPUS = "GPU UUIDs"  # tells two machines with equal hardware and host names apart
# In the order in which they are shown.
FACTS = (
    *("GPUs", "links", "driver", "NCCL", "torch", "CUDA", "cuDNN", "Python", "CPU", "cores"),
    *("memory", "host", "date", GPUS, "SM clock, most", "commit", "code that measures"),
)
OF_ENVIRONMENT = {
    **{name: ("versions", name.lower()) for name in ("torch", "Python", "NCCL", "CUDA", "cuDNN")},
    **{"driver": ("gpu", "driver"), "CPU": ("cpu", "model"), "cores": ("cpu", "cores")},
    "memory": ("cpu", "memory_bytes"),
}
# Beside them, of the records of one cell: fields of a cell that are no options, facts that studies
# have already, what ranks say of themselves, and how NCCL connected them.
NO_OPTIONS = (
    *("gpus", "hosts", "server_gpus", "server_hosts", "places"),
    *("labels", "repeat", "declared"),
)
OF_STUDIES = (
    *("host", "cpu", "git", "code", "topology", "links", "planned_uuids", "variables", "inherited"),
    *("left_out", "hosts", "interfaces"),
)
OF_RANKS = ("threads", "started")
OF_CONNECTIONS = ("transport", "channels")
# Ends of names that FACTS have, or that tell one GPU from another of a host.
AMONG_FACTS = (
    *("versions.python", "versions.torch", "versions.nccl", "versions.cuda", "versions.cudnn"),
    *("packages.torch", "gpu.driver", "gpus.name", "gpus.max_sm_mhz"),
    *("gpus.id", "gpus.uuid", "gpus.bus_id"),
)


@dataclass(frozen=True)
class StudyPath:
    """A folder as the user named it."""

    label: str  # of the user; empty: none was given
    folder: Path

    @staticmethod
    def of(text: str) -> "StudyPath":
        """Read `FOLDER` or `LABEL=FOLDER`; a folder that exists is taken as it is."""
        labelled = LABELLED.fullmatch(text)
        if labelled is None or Path(text).exists():
            return StudyPath("", Path(text))
        return StudyPath(labelled[1].strip(), Path(labelled[2]))


@dataclass(frozen=True)
class StudyInput:
    """What one machine measured of one study."""

    name: str  # for people; no other input has it
    folder: Path  # of the study
    study: Study
    # {host: its name beside other inputs} where these have other hosts.
    hosts: Mapping[str, str] = field(default_factory=dict)


def open_inputs(paths: Sequence[StudyPath], check: Check | None = None) -> list[list[StudyInput]]:
    """Return the inputs of each folder: one for each machine of each study in it.

    `check` is as open_study has it.

    Raises:
        OSError: it is not a folder, or cannot be read.
        ValueError: it holds no record, or a study is named twice.
    """
    folders = []
    compared: set[Path] = set()
    for path in paths:
        for folder in studies_in(path.folder):
            if folder.resolve() in compared:
                raise ValueError(f"{folder}: the same study is named twice")
            compared.add(folder.resolve())
            folders.append((path, folder))
    opened = []
    different_hosts = set()
    for path, folder in folders:
        for study in _open(folder, compared, check):
            opened.append((path, folder, study))
            different_hosts.add(_hosts(study))
    different_hosts.discard(())
    inputs: dict[int, list[StudyInput]] = defaultdict(list)
    for name, (path, folder, study) in zip(_names(opened), opened, strict=True):
        renamed = {}
        if len(different_hosts) > 1:
            for rank, host in enumerate(_hosts(study), 1):
                renamed[host] = f"host{rank}"
        inputs[id(path)].append(StudyInput(name, folder, study, renamed))
    return list(inputs.values())


def studies_in(folder: Path) -> list[Path]:
    """Return the studies in a folder: itself, or those that lie in it. Raises as `open_inputs`."""
    refuse_no_folder(folder)
    cells = set()
    for path in record_paths(folder):
        cell = path.parent
        if ATTEMPT.fullmatch(cell.name):
            cell = cell.parent
        cells.add(cell)
    if not cells:
        raise ValueError(
            f"{folder}: holds no record; expected the folder of a study (<output_dir>/<study>)"
        )
    return sorted({cell.parent for cell in cells} - cells)


def _open(folder: Path, compared: Iterable[Path], check: Check | None) -> list[Study]:
    records, errors = read_study(folder, check)
    neighbours = set()
    for path in compared:
        if path.parent == folder.resolve().parent:
            neighbours.add(path.name)
    scatters = of_other_studies(folder, neighbours)
    machines, of_machine = Machines(records), defaultdict[str, list[Record]](list)
    for record in records:
        of_machine[machines.name(record)].append(record)
    parts = list(of_machine.values()) or [[]]
    studies = [Study.of(part, (), folder, scatters) for part in parts]
    studies[0] = dataclasses.replace(studies[0], unreadable=unreadable_files(folder, errors))
    return studies


def _hosts(study: Study) -> tuple[str, ...]:
    hosts: set[str] = set()
    for record in study.records:
        hosts.update(record.cell.every_host)
    return tuple(sorted(hosts))


def _names(opened: Sequence[tuple[StudyPath, Path, Study]]) -> list[str]:
    """Return a name for each input: a label or `4 × H200 on vm`, and what tells it apart."""
    names: list[tuple[str, ...]] = []
    facts: list[tuple[str, ...]] = []
    for path, folder, study in opened:
        name, gpu = "no machine", ""
        if study.records:
            first = study.records[0]
            host = first.environment.get("host", "unknown host")
            if first.cell.hosts:
                host = compress_hosts(_hosts(study))
            name, gpu = f"{short_hardware(first)} on {host}", first_gpu(identities_of(first))
        names.append((path.label or name,))
        facts.append((folder.resolve().name, gpu, str(folder)))  # what people know best first
    for fact in range(len(facts[0])):
        values = defaultdict[tuple[str, ...], set[str]](set)
        for name_parts, of_input in zip(names, facts, strict=True):
            values[name_parts].add(of_input[fact])
        for index, of_input in enumerate(facts):
            if len(values[names[index]]) > 1:
                names[index] = (*names[index], of_input[fact])
    return [BETWEEN.join(name_parts) for name_parts in names]


def differing(inputs: Sequence[StudyInput]) -> tuple[dict[str, list[str]], dict[str, str]]:
    """Return {fact: its value in each input} of facts that differ, and {fact: value} of others.

    A fact that an input's records do not say is NOT_KNOWN, and differs from nothing; a variable
    that was not set is `unset`.
    """
    each = [_facts(study_input.study) for study_input in inputs]
    defaults = dict.fromkeys(FACTS, NOT_KNOWN)
    for name in sorted(set().union(*each) - {*FACTS}):
        defaults[name] = "unset"
    apart, shared = dict[str, list[str]](), dict[str, str]()
    for name, default in defaults.items():
        values = [of_input.get(name, default) for of_input in each]
        different = {*values} - {NOT_KNOWN}
        if len(different) > 1:
            apart[name] = values
        elif different:
            shared[name] = different.pop()
    return apart, shared


def records_facts(records: Iterable[Record]) -> dict[str, frozenset[str]]:
    """Return {name: its values} of what records of one cell say beside the facts of their study:
    options, hashes of the user's own code, limits, packages, ranks, transport.
    """
    facts = defaultdict[str, set[str]](set)
    for record in records:
        cell = record.cell.to_dict()
        for name in NO_OPTIONS:
            cell.pop(name, None)
        for group, rules in record.cell.declared.items():
            module, _ = split(rules.get("target", group))
            file = f"{module.replace('.', '/') or group}.py"
            cell[f"{CODE}{file}"] = rules.get("sha256", "none")
        environment = dict(record.environment)
        for name in OF_STUDIES:
            environment.pop(name, None)
        for rank in record.ranks:
            for name in OF_RANKS:
                if name in rank:
                    facts[f"ranks.{name}"].add(str(rank[name]))
        for name in OF_CONNECTIONS:
            if record.effective.get(name):
                facts[name].add(str(record.effective[name]))
        for name, value in _leaves({**cell, **environment, "validity": record.validity.limits}):
            facts[name].add(value)
    return {name: frozenset(values) for name, values in facts.items()}


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield (name.name, text) of a value in JSON; entries of a list have the name of the list."""
    if isinstance(value, Mapping):
        for key, of_key in value.items():
            yield from _leaves(of_key, f"{name}.{key}".strip("."))
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _leaves(entry, name)
    elif not name.endswith(AMONG_FACTS):
        yield name, to_text(value)


def same_machine(inputs: Sequence[StudyInput]) -> bool:
    """Return whether all inputs are of one machine, as far as its facts tell."""
    apart, _ = differing(inputs)
    return not {"host", "GPUs", GPUS, "CPU", "cores"} & apart.keys()


def _facts(study: Study) -> dict[str, str]:
    """Return {fact: what the records say of it}; an inherited variable is a fact too."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for record in study.records:
        for name, value in _facts_of_record(record).items():
            counts[name][value] += 1
    facts = {}
    for name, of_fact in counts.items():
        values = sorted(of_fact)
        if of_fact.total() < len(study.records):
            values.append("unset")
        facts[name] = " or ".join(values)
        if len(of_fact) > MOST:
            facts[name] = f"{min(of_fact)} to {max(of_fact)}"
    widest = max(study.records, key=lambda record: len(record.cell.every_host), default=None)
    if widest is not None and widest.cell.hosts:
        # A cell on one of several hosts says nothing of the others.
        for name, value in _facts_of_record(widest).items():
            if name in ("GPUs", "host"):
                facts[name] = value
    return facts


def _facts_of_record(record: Record) -> dict[str, str]:
    environment, on_gpus = record.environment, record.cell.device == "cuda"
    facts: dict[str, Any] = {
        "GPUs": hardware(record) if on_gpus else "none",
        "host": compress_hosts(sorted(record.cell.every_host)) or environment.get("host"),
        "date": f"{datetime.fromtimestamp(record.started_at, timezone.utc):%Y-%m-%d}",
        "code that measures": environment.get("code"),
    }
    for name, (group, key) in OF_ENVIRONMENT.items():
        if on_gpus or name not in ("NCCL", "CUDA", "cuDNN"):
            facts[name] = environment.get(group, {}).get(key)
    links = Counter(environment.get("links", {}).values())
    if len(links) == 1:
        facts["links"] = f"{next(iter(links))} between all"
    elif links:
        pairs = [f"{name} between {count}" for name, count in links.most_common(MOST)]
        facts["links"] = f"{', '.join(pairs)} pairs"
    memory, git = facts.pop("memory"), environment.get("git", {})
    if memory is not None:
        facts["memory"] = f"{memory / 2**30:,.0f} GiB"
    gpu_uuid = first_gpu(identities_of(record))
    if gpu_uuid:
        facts[GPUS] = f"{gpu_uuid}…"
    clocks = []
    for gpu in gpus_of(environment):
        if gpu.get("max_sm_mhz") is not None:
            clocks.append(gpu["max_sm_mhz"])
    if clocks:
        facts["SM clock, most"] = f"{max(clocks)} MHz"
    if git.get("commit"):
        facts["commit"] = git["commit"][:7]
        if git.get("modified"):
            facts["commit"] = f"{facts['commit']}, modified"
    texts = {}
    for name, fact in facts.items():
        if fact:
            texts[name] = str(fact)
    return texts | inherited(record)

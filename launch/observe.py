"""Watch any running command with the instruments of a cell, and say what was seen.

`python -m launch observe -- COMMAND…` changes no line of the command's programs: Python starts the
instruments in each process that imports torch. There is no study and no baseline.
"""

import json
import os
import secrets
import shlex
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from analysis.console import print_text
from analysis.findings.slow_rank import FOREIGN_LOAD, GPU, LINK, Delay, Diagnosis, diagnosis
from analysis.nccl.log import NcclLog, read_nccl_log
from analysis.report.report_files import Report, write
from analysis.report.sections.conditions_section import fast_path_section
from analysis.text import count, join_words, redact
from analysis.validity.effective import choices_of
from analysis.validity.fast_paths import DEFAULTS, NEED_TUNING, NO, UNKNOWN, YES, Answer, answers_to
from analysis.validity.nccl_settings import Evidence, check_setting
from benchmarks.agent.sampler import Sampler
from benchmarks.record import CellFolder
from benchmarks.record.lines import read_lines
from benchmarks.record.safe_files import make_folder, write_whole
from benchmarks.record.safe_text import INTERRUPTED
from benchmarks.training.derive import path_tables
from conf.host import TOKEN
from conf.options import Refused
from conf.schema import Tracking
from launch.engines.environment import NCCL_SUBSYSTEMS
from launch.machine import devices
from launch.machine.facts import ROOT
from launch.tracking.tracker import Tracker

REPORT_SECONDS = 30.0
TIMING = "TORCH_NCCL_ENABLE_TIMING"  # of collectives; without it no rank is judged on GPUs
HOOKS = ROOT / "benchmarks" / "script" / "hooks"
KINDS = {
    "loader": "it waits for its data loader",
    "compute": "it computes for longer",
    "sleep": "it sleeps",
    "clock": "all parts are slower alike, as at a lower clock",
    FOREIGN_LOAD: "it waits for a core that other programs use",
    GPU: "its GPU reaches that collective last",
}
ENGAGED = {NO: "and did not engage", UNKNOWN: "and it is not known whether it engaged"}


def observe(command: Sequence[str], output_dir: Path, uri: str | None = None) -> int:
    """Run a command, say what was seen, and return 1 if it failed, 130 after Ctrl-C, else 0.

    With a tracking URI it is also a run of MLflow's.

    Raises Refused: no command, or there is no such one; TrackingUnavailable.
    """
    if not command:
        raise Refused(
            "COMMAND is missing; expected it behind --, as in "
            "python -m launch observe -- torchrun --nproc_per_node=2 train.py"
        )
    if shutil.which(command[0]) is None:
        program = f"python {command[0]}" if command[0].endswith(".py") else "a program"
        raise Refused(f"COMMAND={command[0]}: it is not found; expected {program}")
    folder = CellFolder((output_dir / "observed" / time.strftime("%Y%m%d-%H%M%S")).absolute())
    for path in (folder.path / "ranks", folder.path / "nccl"):
        make_folder(path)
    tracker = None
    if uri is not None:
        tracker = Tracker(Tracking(uri=uri), output_dir, "observed")
    token, started_at = secrets.token_hex(8), time.time()
    uuids = [device.uuid for device in devices.look("auto", os.environ).devices if device.uuid]
    with Sampler(folder, uuids, token):
        process = subprocess.Popen(command, env=os.environ | _variables(folder, token))
        interrupted = _wait(process, folder, command)
    seen, answers, log = _seen(folder)
    said = _sentences(seen, answers, log, command)
    line = redact(shlex.join(command))
    content = {"command": line, "status": process.returncode, "started_at": started_at}
    content |= {"said": said, **asdict(seen)}
    content["fast_paths"] = [answer._asdict() for answer in answers]
    write_whole(folder.path / "observed.json", json.dumps(content, indent=2).encode())
    sections = tuple(filter(None, [fast_path_section(answers)]))
    report = Report("Observed", line, tuple(said[:-1]), {said[-1]: ""}, sections)
    write(report, folder.path / "report")
    print_text("\n".join([*said, f"Lines, page and record: {folder.path}"]))
    if tracker is not None:
        tracker.log_observed(content, folder.path)
    return INTERRUPTED if interrupted else int(process.returncode != 0)


def _variables(folder: CellFolder, token: str) -> dict[str, str]:
    settings = {"lines": f"{folder.path}/ranks/{{rank}}.jsonl"}
    python_path = filter(None, (str(HOOKS), os.environ.get("PYTHONPATH")))
    added = {
        "PYTHONPATH": os.pathsep.join(python_path),
        "RINGSIDE_SCRIPT": json.dumps(settings),
        TOKEN: token,
    }
    if TIMING not in os.environ:
        added[TIMING] = "1"
    if "NCCL_DEBUG" not in os.environ:
        subsystems = NCCL_SUBSYSTEMS
        if not NEED_TUNING.isdisjoint(os.environ):
            subsystems += ",TUNING,REG"
        added |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": subsystems}
        added["NCCL_DEBUG_FILE"] = folder.nccl_log_pattern
    return added


def _wait(process: subprocess.Popen[bytes], folder: CellFolder, command: Sequence[str]) -> bool:
    """Wait for the command, and return whether Ctrl-C ended it; a terminal sends it that, too."""
    interrupted = False
    while process.poll() is None:
        try:
            process.wait(REPORT_SECONDS)
        except subprocess.TimeoutExpired:
            if sys.stdout.isatty():
                print_text("\n".join(_sentences(*_seen(folder), command)[:-1]))
        except KeyboardInterrupt:
            if interrupted:
                process.kill()
            elif not sys.stdin.isatty():
                process.terminate()
            interrupted = True
    return interrupted


def _seen(folder: CellFolder) -> tuple[Diagnosis, list[Answer], NcclLog | None]:
    lines = {}
    for path in (folder.path / "ranks").glob("*.jsonl"):
        lines[int(path.stem)] = list(read_lines(path))
    logs, log, effective = sorted((folder.path / "nccl").glob("*.log")), None, {}
    settings = {name: os.environ[name] for name in os.environ if name.startswith("NCCL_")}
    if logs:
        log = read_nccl_log(logs)
        effective = _effective(log, settings)
    rows = path_tables(lines).get("fast_paths", {}).get("rows", [])
    ranks = [DEFAULTS | row | {"ranks": len(lines)} for row in rows]
    return diagnosis(lines), answers_to(ranks, settings, effective, True), log


def _effective(log: NcclLog, settings: Mapping[str, str]) -> dict[str, Any]:
    findings: list[dict[str, Any]] = []
    evidence = Evidence(settings, log, {}, tuple(range(log.nranks or 0)))
    for name, value in settings.items():
        findings += map(asdict, check_setting(name, value, evidence, None))
    nccl = {"channels": log.channels, "transports": log.transports, "paths": log.paths}
    effective: dict[str, Any] = {"nccl": nccl, "findings": findings, "choices": choices_of(log)}
    if log.transports:
        effective |= {"transport": _transports(log), "channels": log.channels.get("collective")}
    return effective


def _sentences(
    seen: Diagnosis, answers: Sequence[Answer], log: NcclLog | None, command: Sequence[str]
) -> list[str]:
    """Return what was seen; the last sentence says what was not measured."""
    said = []
    if seen.steps:
        low_ms, high_ms = seen.spread_ms
        said.append(
            f"{seen.samples_per_s:,.1f} samples/s on {count(seen.ranks, 'rank')}: a step takes "
            f"{seen.step_ms:.1f} ms, nine of ten between {low_ms:.1f} and {high_ms:.1f} ms."
        )
    said += [_delay_sentence(delay, seen) for delay in seen.delays]
    if seen.unjudged:
        said.append(f"No rank is judged: {seen.unjudged}.")
    elif not seen.delays:
        subject = "Nothing wrong"
        if any(answer.answer == NO for answer in answers):
            subject = "No slow rank"
        least = [f"{ms:.1f} ms to {kind}" for kind, ms in seen.least_ms.items()]
        named = f"A rank that loses, in every step, {join_words(least)}"
        if GPU in seen.least_ms:
            named = f"A rank for which the others wait {seen.least_ms[GPU]:.1f} ms in every step"
        said.append(
            f"{subject} was seen in {count(seen.steps, 'step')}. {named} would have been named."
        )
    for answer in answers:
        if answer.answer in ENGAGED:
            engaged = ENGAGED[answer.answer]
            said.append(f"{answer.path} was asked for ({answer.asked}), {engaged}: {answer.line}.")
    names = [answer.path for answer in answers if answer.answer == YES]
    if names:
        said.append(f"Asked for, and seen to engage: {join_words(names)}.")
    if log is not None:
        said.append(f"NCCL {log.version} used {_transports(log)}.")
    script = next((index for index, word in enumerate(command) if word.endswith(".py")), 0)
    run = shlex.quote("benchmark.run=" + shlex.join(command[script:]))
    said.append(
        "No efficiency is claimed: that needs a run on one GPU, as of "
        f"python launch.py -m gpus=scale benchmark=script {run}"
    )
    return [redact(sentence) for sentence in said]


def _delay_sentence(delay: Delay, seen: Diagnosis) -> str:
    cost = f"The job loses up to {delay.samples_per_s:,.1f} samples/s by it."
    if delay.kind == LINK:
        peer = "another host" if delay.peer is None else f"rank {delay.peer}"
        return (
            f"The link between rank {delay.rank} and {peer} is slow: all ranks wait {delay.ms:.1f} "
            f"ms of a step for data ({delay.part} while data is under way). {cost}"
        )
    where = f"{delay.part} the forward" if delay.part == "before" else f"in the {delay.part}"
    if delay.bucket is not None:
        layers = join_words(list(seen.layers[delay.bucket]), 4)
        where += f" of bucket {delay.bucket} (layers {layers})"
    return (
        f"Rank {delay.rank} is slow: the others wait {delay.ms:.1f} ms of a step for it, mostly "
        f"{where}; {KINDS[delay.kind]}. {cost}"
    )


def _transports(log: NcclLog) -> str:
    pairs: defaultdict[str, list[str]] = defaultdict(list)
    for pair, transports in log.transports.items():
        pairs[" and ".join(transports)].append(pair)
    return join_words([f"{transport} ({join_words(ranks)})" for transport, ranks in pairs.items()])

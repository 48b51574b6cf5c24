"""Find Nsight Systems, make its command around a cell's agent, and export what it recorded."""

import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from analysis.input_files import UnreadableInput
from conf.options import Refused

# The oldest release that was tried with the options below: Debian 12's.
OLDEST = (2022, 4)
ANSWER_SECONDS = 60
IMPORT_SECONDS = 600
REPORT, PARTIAL = ".nsys-rep", ".qdstrm"


@dataclass(frozen=True)
class Nsys:
    """A usable nsys."""

    path: Path
    version: str  # 2022.4.2.1

    def command(self, report: Path, on_gpu: bool, graphs: bool) -> list[str]:
        """Return the command that comes before the agent's; `report` is the path of the report
        without its suffix. On a GPU only what ranks do in a capture range is recorded."""
        options = [
            f"--output={report}",
            "--force-overwrite=true",
            "--sample=none",
            "--cpuctxsw=none",
            "--wait=primary",
        ]
        options.append("--trace=cuda,nvtx" if on_gpu else "--trace=nvtx")
        if graphs:
            options.append("--cuda-graph-trace=node")
        if on_gpu:  # the ranks go on after its end
            options += ["--capture-range=cudaProfilerApi", "--capture-range-end=stop"]
        return [str(self.path), "profile", *options]

    @staticmethod
    def left(report: Path) -> bool:
        """Return whether a run left a recording, imported or not, at the path of a report without
        its suffix."""
        return any(report.with_name(report.name + suffix).exists() for suffix in (REPORT, PARTIAL))

    def export(self, report: Path) -> Path:
        """Export the report at a path without its suffix, and return the SQLite file next to it;
        the report stays.

        Raises UnreadableInput: there is no report, or it cannot be imported or exported; says what
        was kept.
        """
        whole, partial = (report.with_name(report.name + suffix) for suffix in (REPORT, PARTIAL))
        if not whole.exists() and partial.exists():
            # nsys did not find its own importer, which stands beside the folder of nsys, followed
            # through symbolic links.
            program = self.path.absolute()
            importer: Path | None = None
            while importer is None:
                importer = next(program.parent.parent.glob("*/QdstrmImporter"), None)
                if not program.is_symlink():
                    break
                program = program.parent / program.readlink()
            if importer is None:
                raise UnreadableInput(
                    f"nsys {self.version} could not import its report: its program QdstrmImporter "
                    f"is missing; what it recorded is kept: {partial}"
                )
            command: list[str | Path] = [importer, "-i", partial]
            try:
                subprocess.run(command, capture_output=True, timeout=IMPORT_SECONDS, check=True)
                partial.unlink(missing_ok=True)
            except (OSError, subprocess.SubprocessError) as error:
                raise UnreadableInput(
                    f"{importer} failed ({error}); what nsys recorded is kept: {partial}"
                ) from None
        if not whole.exists():
            raise UnreadableInput(
                f"nsys {self.version} ended and left no report: nothing was recorded"
            )
        from analysis.trace.source import exported  # with numpy, which a plan does not need

        try:
            return exported(whole, report.parent, str(self.path))
        except UnreadableInput as error:
            raise UnreadableInput(f"{error}; the report is kept: {whole}") from None


def find(typed: str | None, surrounding: Mapping[str, str]) -> Nsys:
    """Return the nsys to use; `typed` is profiler.nsys_path.

    Raises Refused: there is none, it does not print its version, or it is too old.
    """
    name, field = "nsys", "profiler=nsys"
    if typed:
        name, field = typed, f"profiler.nsys_path={typed}"
    elif surrounding.get("NSYS"):
        name = surrounding["NSYS"]
        field = f"NSYS={name}"
    path = shutil.which(name, path=surrounding.get("PATH"))
    if path is None:
        reason = "nsys is not on PATH" if field == "profiler=nsys" else "is not a program"
        raise Refused(
            f"{field}: {reason}; expected a path to it in profiler.nsys_path or NSYS, "
            "profiler=torch, or profiler=auto"
        )
    version = None
    try:
        command = [path, "--version"]
        answer = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=ANSWER_SECONDS
        )
        if answer.returncode == 0:
            version = re.search(r"version (\d+(?:\.\d+)+)", answer.stdout)
    except (OSError, subprocess.TimeoutExpired):
        version = None
    if version is None:
        raise Refused(
            f"{field}: {path} --version does not say a version; expected a working Nsight Systems"
        )
    if tuple(map(int, version[1].split(".")[:2])) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise Refused(
            f"{field}: version {version[1]}; expected {oldest} or newer, or profiler=torch"
        )
    return Nsys(Path(path).absolute(), version[1])

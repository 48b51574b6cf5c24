"""The files of a report: one HTML page, Markdown and a LaTeX document, by jinja2, and its folder.

The page is whole in itself: drawings inside, no script, nothing fetched. jinja2 escapes every text
of a record. The page lists the files that were written with it (`<meta name="ringside-files" …>`).
A folder with such a page is replaced as a whole: the new files are written into a folder beside it,
files that the page does not list are the user's and are taken along, and then the two folders are
swapped. Whatever ends the writing leaves the earlier report as it was.

`methods.tex` is the setup paragraph of a paper, from the records; what they do not say is left out.
"""

import html
import json
import os
import re
import shutil
import stat
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from analysis.findings.examine import Findings
from analysis.report.figure import COLOURS, Figure
from analysis.report.latex import latex
from analysis.report.section import RATE, Section, words_of
from analysis.report.table import LENGTH_ON_PAGE, Table
from analysis.study.names import format_option, unit_of
from analysis.study.noise_floor import is_suspect
from analysis.study.provenance import hardware
from analysis.study.runs import named
from analysis.study.study import Study
from analysis.text import count, join_words, markdown, single_line, split_command
from benchmarks.record import Record
from benchmarks.record.safe_files import make_folder, refuse_other

# As README has it.
BIBTEX = """\
@software{ringside, title = {Ringside: scaling studies of distributed training},
  author = {{The Ringside developers}}, year = {2026}, version = {0.1.0}}
"""
SOFTWARE = {
    "torch": "PyTorch", "cuda": "CUDA", "cudnn": "cuDNN", "nccl": "NCCL", "python": "Python",
}  # fmt: skip
MOST_VALUES = 8  # of one fact; of more the number is given
Fact = Callable[[Record], object]


def methods(study: Study, findings: Findings) -> str:
    """Return the paragraph as LaTeX; of a study without usable records a comment."""
    if not study.usable:
        return "% No usable run.\n"
    commit = _worded(study.usable, " (commit", lambda record: _of(record, "git", "commit"))
    lines = [*setup(study), *protocol(study, findings)]
    measured = rf"All numbers were measured with Ringside{latex(commit and commit + ')')}"
    text = [rf"{measured}~\cite{{ringside}}.", *map(latex, map(words_of(study), lines)), ""]
    return "\n".join(text)


def setup(study: Study) -> list[str]:
    """Return the machine, its software, and what was trained on it with which settings."""
    used = study.usable
    trained = [record for record in used if record.cell.trains]
    # A machine without a name is none.
    known = [record for record in used if "unknown" not in hardware(record)]
    machine = [_worded(known, "Machine:", hardware)]
    machine.append(_worded(used, "CPU", lambda record: _of(record, "cpu", "model")))
    software = []
    if unit_of(study) == "GPUs":
        machine.append(_worded(used, "links between GPUs", _links))
        software = [_worded(used, "NVIDIA driver", lambda record: _of(record, "gpu", "driver"))]
    for key, name in SOFTWARE.items():
        software.append(_worded(used, name, partial(_of, part="versions", name=key)))
    settings: dict[str, None] = {}
    for record in trained:
        for name, value in record.cell.nccl.items():
            settings[format_option(name, str(value))] = None
    facts = [
        _worded(trained, "Model", lambda record: record.cell.model.name),
        _worded(trained, "batch", batch_of),
        _worded(trained, "precision", lambda record: record.cell.precision),
        _worded(trained, "execution", lambda record: record.cell.optimize),
        _worded(trained, "optimizer", lambda record: record.cell.optimizer.name),
        _worded(trained, "data", lambda record: record.cell.data.get("name", "synthetic")),
        _worded(trained, "strategies", lambda record: named(record, "strategy")),
        f"NCCL settings {join_words(list(settings), MOST_VALUES)}" if settings else "",
    ]
    others = [record for record in used if not record.cell.trains]
    benchmarks = _worded(others, "Benchmarks:", lambda record: named(record, "benchmark"))
    lines = []
    for start, words in (("", machine), ("Software: ", software), ("", [benchmarks]), ("", facts)):
        text = "; ".join(filter(None, words))
        if text:
            lines.append(f"{start}{text}.")
    return lines


def protocol(study: Study, findings: Findings) -> list[str]:
    """Return what was repeated, in which order, and how efficiency and intervals were made."""
    counted = [record for runs in study.runs for record in runs.records]
    repeats = sorted({len(runs.records) for runs in study.runs})
    ends = " to ".join(dict.fromkeys(map(str, (repeats[0], repeats[-1]))))
    lines = [
        f"{count(len(study.runs), 'configuration was', 'configurations were')} measured in "
        f"{count(len(counted), 'run')}, {ends} of each; a value "
        "is the median over the runs of its configuration."
    ]
    if repeats[-1] > 1 and _is_interleaved(counted):
        lines.append("Repeats were interleaved: every round measured each configuration once.")
    if study.timed:
        lines.append("A rate is the number of counted images over the time of the slowest rank.")
    if any(point.efficiency for curve in findings.scaling.curves for point in curve.points):
        lines.append(
            "Efficiency is the rate of N GPUs over N times the rate of the slowest of them "
            "measured alone."
        )
    if any(runs.floor(RATE) is not None for runs in study.timed):
        lines.append(
            "Intervals are 95 % prediction intervals for one more run, by Student's t on the "
            "logarithm of the rate, with the scatter of repeated runs of equal configurations."
        )
    if any(pair.verdict for pair in findings.comparisons):
        lines.append(
            "Differences were tested on the logarithm of the rate, with Holm's method for the "
            "error of all comparisons together (5 %)."
        )
    suspect = sum(map(is_suspect, counted))
    if suspect:
        lines.append(f"Checks cast doubt on {count(suspect, 'run')}, which are included.")
    if study.excluded:
        runs_out = count(len(study.excluded), "failed or invalid run")
        lines.append(f"Not included: {runs_out}.")
    return lines


def _is_interleaved(records: Iterable[Record]) -> bool:
    turns = []
    for record in records:
        if not record.drift:
            turns.append((record.sweep_id, record.started_at, record.cell.repeat))
    order = [(sweep, repeat) for sweep, _, repeat in sorted(turns)]
    return order == sorted(order)  # no repeat of a sweep began before one with a lower number


def _links(record: Record) -> str:
    return "/".join(sorted(set(record.environment.get("links", {}).values())))


def batch_of(record: Record) -> str:
    """Return the images of a step, in words."""
    if record.cell.global_batch_size is None:
        return f"{record.cell.batch_size:,} images per GPU per step"
    return f"{record.cell.global_batch_size:,} images per step on all GPUs together"


def _of(record: Record, part: str, name: str) -> str:
    return str(record.environment.get(part, {}).get(name) or "")[:40]


def _worded(records: Iterable[Record], name: str, fact: Fact) -> str:
    """Return `precision bf16`, with all values of a fact; empty where no record says it."""
    values = list(filter(None, dict.fromkeys(str(fact(record) or "") for record in records)))
    return f"{name} {join_words(values, MOST_VALUES)}" if values else ""


# No script runs and nothing is fetched, whatever a record holds. Drawings have styles inside and
# may hold images.
POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
    "form-action 'none'"
)
PAPER = r"""% Every figure and table of this report, each a file to \input: latexmk -pdf paper.tex
\documentclass[10pt]{article}
\usepackage[a4paper,margin=2cm]{geometry}
\usepackage{booktabs,graphicx,longtable}
\graphicspath{{figures/}}
\begin{document}"""
PAGE = "index.html"
_LISTED = re.compile(r'<meta name="ringside-files" content="([^"]*)">')
PAGE_ROWS = 60  # of a table on the page and in Markdown; the CSV has all


@dataclass(frozen=True)
class Report:
    """The content of a report."""

    study: str
    setting: str  # the machine, how many runs, and when, in a line
    finding: tuple[str, ...]  # at most five sentences: two answer, the others explain
    unsaid: Mapping[str, str]  # {what was not measured, and why: the command that measures it}
    sections: tuple[Section, ...]
    limits: str = ""  # a sentence on limits of checks that were not the defaults
    verdict: str = ""  # of all runs together
    is_doubtful: bool = False  # the numbers of the answer are
    answer: Figure | None = None  # the figure beside it
    methods: str = ""  # the setup paragraph of a paper, as LaTeX

    @property
    def figures(self) -> list[Figure]:
        """The figure beside the answer, then those of all sections."""
        figures = [self.answer] if self.answer else []
        for section in self.sections:
            figures += section.figures
        return figures

    @property
    def tables(self) -> list[Table]:
        """The tables of all sections."""
        tables: list[Table] = []
        for section in self.sections:
            tables += section.tables
        return tables


def page(report: Report, files: Sequence[str] = ()) -> str:
    """Return the HTML page; `files` are those written with it."""
    return filled("report.html.j2", report, colours=COLOURS, files=files, policy=POLICY)


def markdown_page(report: Report) -> str:
    """Return the report as Markdown; its figures are files of the folder `figures`."""
    return filled("report.md.j2", report)


def paper(report: Report) -> str:
    """Return the LaTeX document that shows every figure and every table with rows."""
    lines = [PAPER, rf"\begin{{center}}\Large {latex(report.study)}\end{{center}}"]
    if report.methods:
        lines += [r"\section*{Experimental setup}", r"\input{methods.tex}"]
    first = Section("answer", "Answer", figures=(report.answer,) if report.answer else ())
    for section in (first, *report.sections):
        inputs = []
        for figure in section.figures:
            if figure.pdf:
                inputs.append(rf"\input{{figures/{figure.name}.tex}}")
        for table in section.tables:
            if table.for_people.rows:
                inputs.append(rf"\input{{tables/{table.name}.tex}}")
        if inputs:
            lines += [rf"\section*{{{latex(section.title)}}}", *inputs, r"\clearpage"]
    return "\n".join(
        [*lines, r"\bibliographystyle{plain}\bibliography{ringside}\end{document}", ""]
    )


def filled(name: str, report: Report, **values: Any) -> str:
    """Return a filled template; in HTML every text is escaped and made a single line."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    is_html = name.endswith(".html.j2")

    def text(value: object) -> str:
        return markdown(value, LENGTH_ON_PAGE)

    def finalize(value: Any) -> Any:
        if is_html and type(value) is str:
            return single_line(value, LENGTH_ON_PAGE)
        return value

    environment = Environment(
        loader=PackageLoader("analysis.report"),
        autoescape=is_html,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=finalize,
    )
    finding = [split_command(single_line(line, LENGTH_ON_PAGE)) for line in report.finding]
    template = environment.get_template(name)
    return template.render(report=report, finding=finding, rows=PAGE_ROWS, text=text, **values)


def write(content: Report, folder: Path) -> Path:
    """Write every file of a report in place of an earlier report's, and return its page.

    Raises OSError: the folder cannot be written, or holds something else than a report.
    """
    texts = {"report.md": markdown_page(content), "paper.tex": paper(content)}
    texts |= {"methods.tex": content.methods, "ringside.bib": BIBTEX}
    drawings = {}
    for table in content.tables:
        texts[f"tables/{table.name}.csv"] = table.to_csv()
        if table.for_people.rows:
            texts[f"tables/{table.name}.tex"] = table.to_latex()
    for figure in content.figures:
        texts[f"figures/{figure.name}.svg"] = figure.svg
        if figure.pdf:
            drawings[f"figures/{figure.name}.pdf"] = figure.pdf
            texts[f"figures/{figure.name}.tex"] = figure.to_latex()
        if figure.data:
            texts[f"figures/{figure.name}.csv"] = figure.data.to_csv()
    texts[PAGE] = page(content, sorted([*texts, *drawings]))
    write_folder(folder, drawings | {name: text.encode() for name, text in texts.items()})
    return folder / PAGE


def write_folder(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write files, by their paths from the folder, and remove those of an earlier report.

    Raises OSError: the folder holds something else than a report (FileExistsError), is a link or no
    folder (NotOurs), or cannot be written.
    """
    refuse_other(folder, stat.S_IFDIR)
    target = folder.resolve()
    users_own = _users_files(folder, target, files)
    make_folder(target.parent)
    name = uuid.uuid4().hex
    new = target.with_name(f".{target.name}.{name}.new")
    old = target.with_name(f".{target.name}.{name}.old")
    try:
        for path, content in files.items():
            (new / path).parent.mkdir(parents=True, exist_ok=True)
            (new / path).write_bytes(content)
        for path in users_own:
            (new / path).parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(target / path, new / path, follow_symlinks=False)
            except OSError:
                shutil.copy2(target / path, new / path, follow_symlinks=False)
        if target.exists():
            target.rename(old)
        try:
            new.rename(target)
        except OSError:
            if old.exists():
                old.rename(target)
            raise
    finally:
        shutil.rmtree(new, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)


def _users_files(folder: Path, target: Path, files: Mapping[str, bytes]) -> list[str]:
    present = []
    for path in sorted(target.rglob("*")):
        if path.is_symlink() or not path.is_dir():
            present.append(str(path.relative_to(target)))
    earlier = None
    try:
        refuse_other(target / PAGE)  # to wait for a pipe would be for ever
        listed = _LISTED.search((target / PAGE).read_text(encoding="utf-8", errors="replace"))
        if listed is not None:
            earlier = {PAGE, *map(str, json.loads(html.unescape(listed[1])))}
    except (OSError, ValueError, TypeError):
        pass  # an unreadable page, or a list that is none, is not a page of Ringside's
    if present and earlier is None:
        raise FileExistsError(
            f"{folder}: holds files, and no report of Ringside; nothing was written (-o names "
            "another folder)"
        )
    # A report has no links and no pipes: one with the name of its file is the user's.
    users_own = []
    for file in present:
        is_file = stat.S_ISREG((target / file).lstat().st_mode)
        if earlier is None or file not in earlier or not is_file:
            users_own.append(file)
            if file in files:
                raise FileExistsError(
                    f"{folder / file}: is not of the earlier report and would be overwritten; "
                    "nothing was written (move it away)"
                )
    return users_own

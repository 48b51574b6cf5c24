"""A report's tables and figures in papers: LaTeX compiles them and they fit a page."""

import csv
import re
import subprocess
from pathlib import Path

import pytest
from records import EVIL

from analysis.report.build import examine, write
from analysis.report.page import Report
from analysis.report.papers.latex import latex
from analysis.report.papers.table import to_latex
from analysis.report.papers.widths import width_em
from analysis.report.section import Section
from analysis.report.tables import Column, Table
from analysis.study.estimates import Estimate

DATA = Path(__file__).parent / "data"
# Links measured alone, settings with notes and remarks, and the table of cells with most columns.
STUDIES = ("h200_x2/links", "h200_x2/bootcamp_pairs", "h200_x4/settings", "h200_x4/waterfall")
OVERFULL_PT = 5.0  # what may stand out of its box


def hostile():
    """Tables with what a record may hold: every block of Unicode, long words, many columns, many rows."""
    letters = "".join(chr(code) for code in range(32, 0x2FFF, 7) if chr(code).isprintable())
    texts = [
        EVIL,
        "日本 αβγ ÄÖÜ éñ ß 50% #1 _x_ ^ ~ \\ -- <a> \udc80",
        "x" * 300,
        "/a/long/path/" * 20,
        letters[:380],
    ]
    texts += [letters[place : place + 380] for place in range(380, len(letters), 380)]
    wide = tuple(
        Column(f"c{place}", f"heading {place}, GB/s", "rate", bounded=True) for place in range(14)
    )
    words = tuple(Column(f"t{place}", f"text_{place} & more") for place in range(9))
    number = Estimate(18579.0, 18523.5, 18634.5)
    return (
        Table("texts", EVIL, (Column("text", "text"), Column("number", "number", "rate")), tuple((t, 1.5) for t in texts)),
        Table("wide", "Wide", (Column("cell", "cell"), *wide), tuple((f"cell {n}", *[number] * 14) for n in range(3))),
        Table("long", "Long", (Column("cell", "cell"), Column("n", "n", "rate")), tuple((f"c{n}", n) for n in range(200))),
        Table("words", "Words", words, tuple(tuple(f"{n} {EVIL}" for _ in words) for n in range(4)), frozenset({1})),
    )  # fmt: skip


def compiled(folder):
    """Compile the document of a report and return LaTeX's log."""
    command = ["latexmk", "-pdf", "-interaction=nonstopmode", "-halt-on-error", "paper.tex"]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, errors="replace", timeout=200
    )
    log = (folder / "paper.log").read_text(encoding="utf-8", errors="replace")
    assert done.returncode == 0, log[-3000:]
    return log


def assert_fits(log):
    overfull = [line for line in log.splitlines() if line.startswith("Overfull")]
    assert [
        line for line in overfull if float(re.findall(r"([0-9.]+)pt too", line)[0]) > OVERFULL_PT
    ] == []
    assert (
        "Float too large" not in log
        and "multiply defined" not in log
        and "Missing character" not in log
    )


@pytest.mark.needs("latexmk")
@pytest.mark.parametrize("study", STUDIES)
def test_every_table_of_a_study_compiles_and_fits_a_page(study, tmp_path):
    told, _ = examine(DATA / study)
    write(told, tmp_path / "out")
    assert_fits(compiled(tmp_path / "out"))


@pytest.mark.needs("latexmk")
def test_whatever_a_record_holds_compiles_and_fits(tmp_path):
    write(Report(EVIL, "", (), (), (Section("all", EVIL, tables=hostile()),)), tmp_path / "out")
    assert_fits(compiled(tmp_path / "out"))


PAGE = r"""\documentclass{article}
\usepackage[a4paper,margin=2cm]{geometry}
\usepackage{array,booktabs,longtable,graphicx}
\graphicspath{{figures/}}
\setlength{\intextsep}{6pt}\setcounter{topnumber}{4}\setcounter{totalnumber}{4}\setcounter{bottomnumber}{4}\renewcommand{\textfraction}{0.02}
\renewcommand{\topfraction}{0.98}\renewcommand{\bottomfraction}{0.98}
\begin{document}
Figure~\ref{fig:strategies-1} has the rates, Table~\ref{tab:waterfall} where the loss is.
\input{figures/efficiency-1}\input{figures/strategies-1}\input{tables/waterfall}\input{tables/wires}
\end{document}
"""


@pytest.mark.needs("latexmk")
def test_a_page_of_a_paper_with_two_figures_and_two_tables(tmp_path):
    told, _ = examine(DATA / "h200_x4/waterfall", "single")
    write(told, tmp_path / "out")
    (tmp_path / "out" / "paper.tex").write_text(PAGE)
    log = compiled(tmp_path / "out")
    assert_fits(log)
    assert "Output written on paper.pdf (1 page" in log and "undefined" not in log


def test_figures_have_the_width_that_was_asked_with_their_numbers_and_caption(tmp_path):
    told, found = examine(DATA / "h200_x2/eager_b", "single")
    write(told, tmp_path / "out")
    figures = tmp_path / "out" / "figures"
    for pdf in figures.glob("*.pdf"):
        text = pdf.read_bytes()
        assert b"/Subtype /Type3" not in text and b"/FontFile2" in text, (
            f"{pdf.name}: fonts are embedded as TrueType"
        )
        (width,) = re.findall(rb"/MediaBox \[ 0 0 ([0-9.]+) ", text)
        assert pdf.stem.startswith("topology") or float(width) == pytest.approx(3.3 * 72)
        assert (
            rf"{{{pdf.stem}.pdf}}" in pdf.with_suffix(".tex").read_text()
            and pdf.with_suffix(".svg").exists()
        )
        assert pdf.with_suffix(".csv").read_text().count("\n") > 1
    rows = list(csv.DictReader((figures / "efficiency-1.csv").open(encoding="utf-8")))
    points = [
        point for curve in found.scaling.curves for point in curve.points if point.world_size > 1
    ]
    assert [float(row["efficiency"]) for row in rows] == [
        point.efficiency.value for point in points
    ]
    assert [float(row["efficiency_low"]) for row in rows] == [
        point.efficiency.low for point in points
    ]
    first = f"{100 * points[0].efficiency.value:.1f}"
    assert first in (figures / "efficiency-1.tex").read_text(), "the caption says the numbers"


def test_text_is_ascii_and_says_what_it_said():
    text = "α = 3 µs × β ≥ 50 % of a_b & c#1 … é ß 日 --svg"
    assert latex(text).isascii()
    assert latex(text) == (
        r"$\alpha$ = 3 $\mu$s $\times$ $\beta$ $\geq$ 50 \% of a\_b \& c\#1 \ldots{} \'{e} \ss{} U+65E5 -{}-svg"
    )
    assert latex("nccl_allreduce", breakable=True) == r"nccl\_\allowbreak{}allreduce"


def test_a_table_too_wide_says_once_what_all_its_rows_share():
    columns = (Column("cell", "cell"), *(Column(f"c{n}", f"column {n}", "text") for n in range(9)))
    rows = tuple(
        (f"resnet50 · gpus {n}", *["the same text everywhere"] * 8, f"text {n} of its own")
        for n in range(3)
    )
    tex = to_latex(Table("t", "All.", columns, rows))
    assert "In every row: cell resnet50; column 0 the same text everywhere; column 1" in tex
    assert r"\begin{tabular}{@{}ll@{}}" in tex and r"gpus 1 & text 1 of its own \\" in tex
    narrow = to_latex(Table("t", "All.", columns[:2], tuple(row[:2] for row in rows)))
    assert narrow.count("the same text everywhere") == 3 and "In every row" not in narrow


def test_widths_are_those_of_computer_modern():
    """A digit is half an em (Knuth, Computer Modern Typefaces: cmr10)."""
    assert width_em("1234567890") == pytest.approx(5.0, abs=0.01) and width_em(
        "m"
    ) == pytest.approx(0.833, abs=0.01)

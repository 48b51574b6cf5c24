"""A report's tables and figures in papers: LaTeX compiles them, text is what pdflatex prints, figures have a paper's width."""

import csv
import re
import subprocess

import pytest
from build import DATA, EVIL, record, study

from analysis.report.build import examine
from analysis.report.latex import latex
from analysis.report.report_files import BIBTEX, Report, write
from analysis.report.section import Section
from analysis.report.table import Column, Table
from analysis.study.intervals import Estimate

STUDIES = ("h200_x2/links", "h200_x4/settings", "h200_x4/waterfall")


def hostile():
    """Tables with what a record may hold: every block of Unicode, long words, many columns, many rows."""
    letters = "".join(chr(code) for code in range(32, 0x2FFF, 7) if chr(code).isprintable())
    foreign = "日本 αβγ ÄÖÜ éñ ß 50% #1 _x_ ^ ~ \\ -- <a> \udc80"
    texts = [EVIL, foreign, "x" * 300, letters[:380], letters[380:760]]
    wide = []
    for index in range(14):
        wide.append(Column(f"c{index}", f"heading {index}, GB/s", kind="rate", bounded=True))
    number = Estimate(18579.0, 18523.5, 18634.5)
    text, count = Column("text", "text"), Column("n", "n", kind="rate")
    wide_rows = tuple((f"cell {n}", *[number] * 14) for n in range(3))
    return (
        Table("texts", EVIL, (text, count), tuple((each, 1.5) for each in texts), frozenset({1})),
        Table("wide", "Wide", (text, *wide), wide_rows),
        Table("long", "Long", (text, count), tuple((f"c{n}", n) for n in range(200))),
    )


def compiled(folder):
    command = ["latexmk", "-pdf", "-interaction=nonstopmode", "-halt-on-error", "paper.tex"]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, errors="replace", timeout=200
    )
    log = (folder / "paper.log").read_text(encoding="utf-8", errors="replace")
    assert done.returncode == 0, log[-3000:]
    return log


@pytest.mark.needs("latexmk")
@pytest.mark.parametrize("name", [*STUDIES, "hostile"])
def test_every_table_and_figure_compiles(name, tmp_path):
    content = Report(EVIL, "", (), {}, (Section("all", EVIL, tables=hostile()),))
    if name != "hostile":
        content, _ = examine(DATA / name)
    write(content, tmp_path / "out")
    log = compiled(tmp_path / "out")
    for complaint in ("Float too large", "multiply defined", "Missing character"):
        assert complaint not in log


def test_the_setup_paragraph_is_made_of_the_records_and_invents_nothing(tmp_path):
    content, _ = examine(DATA / "h200_x2" / "strategies")
    for words in (
        *(
            "2 $\\times$ NVIDIA H200",
            "NV18",
            "driver 580.159.04",
            "NCCL 2.28.9",
            "batch 256 images",
        ),
        *("precision bf16", "24 runs, 3 of each", "interleaved", "95~\\% prediction", "Holm"),
    ):
        assert words in content.methods
    assert "Efficiency" not in content.methods, "no GPU ran alone"
    bare = study(tmp_path / "bare", [record(1, [0], 100.0) | {"environment": {}, "ranks": []}])
    text = examine(bare)[0].methods
    assert not re.search("Software|driver|commit|CPU|interleaved|Intervals", text), text
    readme = (DATA.parent.parent / "README.md").read_text(encoding="utf-8")
    assert " ".join(BIBTEX.split()) in " ".join(readme.split())


def test_tables_are_booktabs_and_long_ones_go_over_pages():
    texts, wide, long = (table.to_latex() for table in hostile())
    for tex in (texts, wide, long):
        assert tex.isascii() and r"\toprule" in tex and r"\bottomrule" in tex
        assert tex.count(r"\begin{") == tex.count(r"\end{")
    assert r"\begin{longtable}" in long and long.count(r"\label{tab:long}") == 1
    assert r"\resizebox" in wide and r"18,579 (18,524 to 18,634)" in wide
    assert texts.count(r"$^\dagger$") == 2, "the doubtful row, and the caption"
    empty = Table("empty", "Nothing.", (Column("text", "text"),), ()).to_latex()
    assert r"\caption{Nothing.}\label{tab:empty}" in empty


def test_figures_have_the_width_that_was_asked_with_their_numbers_and_caption(tmp_path):
    content, findings = examine(DATA / "h200_x2/eager_b", "single")
    write(content, tmp_path / "out")
    figures = tmp_path / "out" / "figures"
    for pdf in figures.glob("*.pdf"):
        text = pdf.read_bytes()
        assert b"/Subtype /Type3" not in text and b"/FontFile2" in text, (
            f"{pdf.name}: fonts are embedded as TrueType"
        )
        (width,) = re.findall(rb"/MediaBox \[ 0 0 ([0-9.]+) ", text)
        assert pdf.stem.startswith("topology") or float(width) == pytest.approx(3.3 * 72)
        tex = pdf.with_suffix(".tex").read_text()
        assert rf"{{{pdf.stem}.pdf}}" in tex and rf"\label{{fig:{pdf.stem}}}" in tex
        assert pdf.with_suffix(".svg").exists()
        assert pdf.with_suffix(".csv").read_text().count("\n") > 1
    rows = list(csv.DictReader((figures / "efficiency-1.csv").open(encoding="utf-8")))
    points = [point for curve in findings.scaling.curves for point in curve.points]
    points = [point for point in points if point.world_size > 1]
    for row, point in zip(rows, points, strict=True):
        assert float(row["efficiency"]) == point.efficiency.value
        assert float(row["efficiency_low"]) == point.efficiency.low
    first = f"{100 * points[0].efficiency.value:.1f}"
    assert first in (figures / "efficiency-1.tex").read_text(), "the caption says the numbers"


def test_text_is_ascii_and_says_what_it_said():
    text = "α = 3 µs × β ≥ 50 % of a_b & c#1 … é ß 日 --svg"
    assert latex(text) == (
        r"$\alpha$ = 3 $\mu$s $\times$ $\beta$ $\geq$ 50 \% of a\_b \& c\#1 \ldots{} e U+00DF U+65E5 -{}-svg"
    )

"""The document that shows every figure and table of a report as a paper would: `latexmk -pdf paper.tex`."""

from analysis.report.page import Report
from analysis.report.papers.latex import latex
from analysis.text import single_line

_BEGINNING = r"""% Every figure and table of this report, each a file to be \input. To compile: latexmk -pdf paper.tex
\documentclass[10pt]{article}
\usepackage[a4paper,margin=2cm]{geometry}
\usepackage{array,booktabs,longtable,graphicx}
\graphicspath{{figures/}}
\begin{document}"""


def document(report: Report) -> str:
    """Return the text of the document; tables without rows are left out."""
    lines = [
        _BEGINNING,
        rf"\begin{{center}}\Large {latex(single_line(report.study))}\end{{center}}",
    ]
    for section in report.sections:
        figures = [f"figures/{picture.name}" for picture in section.pictures if picture.pdf]
        tables = [f"tables/{table.name}" for table in section.tables if table.rows]
        if figures or tables:
            inputs = [rf"\input{{{name}.tex}}" for name in (*figures, *tables)]
            lines += [rf"\section*{{{latex(single_line(section.title))}}}", *inputs, r"\clearpage"]
    return "\n".join([*lines, r"\end{document}", ""])

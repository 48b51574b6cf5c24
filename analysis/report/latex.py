"""Text, tables and figures as LaTeX for papers, with booktabs."""

import re
import unicodedata
from collections.abc import Collection, Sequence

from analysis.text import single_line

SYMBOLS = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_",
    "{": r"\{", "}": r"\}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
    "<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}", "[": "{[}", "]": "{]}",
    "\N{MINUS SIGN}": "$-$", "\N{NO-BREAK SPACE}": "~", "→": r"$\rightarrow$", "×": r"$\times$",
    "÷": r"$\div$", "±": r"$\pm$", "·": r"$\cdot$", "≤": r"$\leq$", "≥": r"$\geq$",
    "≈": r"$\approx$", "²": "$^2$", "°": r"$^\circ$", "†": r"$^\dagger$", "–": "--", "—": "---",
    "…": r"\ldots{}", "“": "``", "”": "''", "’": "'", "µ": r"$\mu$", "α": r"$\alpha$",
    "β": r"$\beta$", "γ": r"$\gamma$",
}  # fmt: skip
# What is not printed as it is; two hyphens are no dash.
SPECIAL = re.compile(r"[^ -~]|[\\&%$#_{}~^<>|[\]]|(?<=[-–—])-")
ONE_PAGE = 45  # rows; what is longer is a longtable
DOUBTFUL = "†"


def latex(text: str) -> str:
    """Return text for pdflatex, on one line; a letter that it lacks becomes its code, `U+4E2D`."""
    return SPECIAL.sub(_printed, single_line(text, 1500))


def _printed(match: re.Match[str]) -> str:
    letter = match[0]
    if letter == "-":
        return "{}-"
    base = unicodedata.normalize("NFD", letter)[0]
    if letter not in SYMBOLS and "A" <= base <= "z":
        return base
    return SYMBOLS.get(letter, f"U+{ord(letter):04X}")


def table_float(
    name: str,
    caption: str,
    headings: Sequence[str],
    formats: str,
    rows: Sequence[Sequence[str]],
    marked: Collection[int],
) -> str:
    r"""Return a float to be \input, with caption and label.

    `formats` has `l` or `r` for each column.
    A table that is wider than the text is made smaller; a row of `marked` is doubtful.
    """
    caption = latex(caption)
    if marked:
        caption += f" {SYMBOLS[DOUBTFUL]} a check doubts these numbers."
    body = []
    for index, row in enumerate(rows):
        cells = [latex(text) for text in row]
        if index in marked:
            cells[0] += SYMBOLS[DOUBTFUL]
        body.append(" & ".join(cells) + r" \\")
    head = [r"\toprule", " & ".join(map(latex, headings)) + r" \\", r"\midrule"]
    label = rf"\label{{tab:{name}}}"
    if len(rows) > ONE_PAGE:
        start = [
            r"% needs \usepackage{booktabs,longtable}",
            r"{\scriptsize",
            rf"\begin{{longtable}}{{{formats}}}",
            rf"\caption{{{caption}}} {label} \\",
            *head,
            r"\endfirsthead",
            *head,
            r"\endhead",
            r"\bottomrule",
            r"\endfoot",
        ]
        end = [r"\end{longtable}", "}"]
    else:
        start = [
            r"% needs \usepackage{booktabs,graphicx}",
            r"\begin{table*}[htbp]",
            r"\centering\footnotesize",
            rf"\caption{{{caption}}}{label}",
            r"\resizebox{\ifdim\width>\textwidth\textwidth\else\width\fi}{!}{%",
            rf"\begin{{tabular}}{{{formats}}}",
            *head,
        ]
        end = [r"\bottomrule", r"\end{tabular}}", r"\end{table*}"]
    return "\n".join([*start, *body, *end, ""])


def figure_float(name: str, caption: str, is_narrow: bool, is_tall: bool) -> str:
    r"""Return a float to be \input: over two columns where the figure is wider than one."""
    environment = "figure" if is_narrow else "figure*"
    size = r"[width=\linewidth,height=0.55\textheight,keepaspectratio]" if is_tall else ""
    lines = [
        r"% needs \usepackage{graphicx} and \graphicspath, which names the folder of the PDF",
        rf"\begin{{{environment}}}[htbp]",
        r"\centering",
        rf"\includegraphics{size}{{{name}.pdf}}",
        rf"\caption{{{latex(caption)}}}\label{{fig:{name}}}",
        rf"\end{{{environment}}}",
    ]
    return "\n".join([*lines, ""])

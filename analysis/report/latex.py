"""LaTeX of papers: texts of records escaped for pdflatex, and the float of a table."""

import re
import unicodedata
from collections.abc import Sequence

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
DOUBTFUL = SYMBOLS["†"]
LENGTH_IN_PAPER = 1500  # characters of a text in a paper


def latex(text: str) -> str:
    """Return text for pdflatex, on one line; a letter that it lacks becomes its code, `U+4E2D`."""
    return SPECIAL.sub(_printed, single_line(text, LENGTH_IN_PAPER))


def _printed(match: re.Match[str]) -> str:
    letter = match[0]
    if letter == "-":
        return "{}-"
    base = unicodedata.normalize("NFD", letter)[0]
    if letter not in SYMBOLS and "A" <= base <= "z":
        return base
    return SYMBOLS.get(letter, f"U+{ord(letter):04X}")


def table_float(
    name: str, caption: str, formats: str, headings: Sequence[str], body: Sequence[str]
) -> str:
    r"""Return a float to be \input; one that is wider than the text is made smaller, one that is
    longer than a page goes over several. Every text is LaTeX already.
    """
    head = [r"\toprule", " & ".join(headings) + r" \\", r"\midrule"]
    label = rf"\label{{tab:{name}}}"
    if len(body) > ONE_PAGE:
        lines = [
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
            *body,
            r"\end{longtable}",
            "}",
        ]
    else:
        lines = [
            r"% needs \usepackage{booktabs,graphicx}",
            r"\begin{table*}[htbp]",
            r"\centering\footnotesize",
            rf"\caption{{{caption}}}{label}",
            r"\resizebox{\ifdim\width>\textwidth\textwidth\else\width\fi}{!}{%",
            rf"\begin{{tabular}}{{{formats}}}",
            *head,
            *body,
            r"\bottomrule",
            r"\end{tabular}}",
            r"\end{table*}",
        ]
    return "\n".join([*lines, ""])

"""A figure as a float of LaTeX: its PDF, its caption with the numbers, a label."""

from analysis.report.papers.latex import latex
from analysis.report.style import WIDTHS_IN, Picture
from analysis.text import single_line

NEEDS = r"% needs \usepackage{graphicx} and \graphicspath, which names the folder of the PDF"


def to_figure(picture: Picture) -> str:
    r"""Return a float to be \input: over two columns where the figure is wider than one. Text has 8 points as it is drawn.

    Drawings of machines and timelines are as wide as the line, or as high as half a page.
    """
    narrow = (
        picture.figure is not None
        and not picture.card
        and picture.figure.get_figwidth() <= WIDTHS_IN["single"]
    )
    kind = "figure" if narrow else "figure*"
    size = r"[width=\linewidth,height=0.55\textheight,keepaspectratio]" if picture.card else ""
    caption = latex(single_line(picture.caption, 1500))
    return "\n".join([
        NEEDS, rf"\begin{{{kind}}}[htbp]", r"\centering", rf"\includegraphics{size}{{{picture.name}.pdf}}",
        rf"\caption{{{caption}}}\label{{fig:{picture.name}}}", rf"\end{{{kind}}}", "",
    ])  # fmt: skip

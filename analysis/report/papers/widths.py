"""How wide text is in LaTeX's own font, Computer Modern, which matplotlib brings along."""

from functools import lru_cache
from typing import Any

from analysis.report.papers.latex import BREAKS_AFTER, LONGEST_WORD

_OTHER = 0.78  # em of a character that the font lacks, as wide as a sign of mathematics
_CODE = 3.5  # em of what stands for a character that pdflatex lacks, `U+4E2D`


@lru_cache(maxsize=1)
def _font() -> Any:
    from matplotlib import get_data_path
    from matplotlib.ft2font import FT2Font

    font = FT2Font(f"{get_data_path()}/fonts/ttf/cmr10.ttf")
    font.set_size(100, 72)
    return font


@lru_cache(maxsize=4096)
def _letter(letter: str) -> float:
    known = letter.isalnum() or letter in " .,:;()+-/=%&#!?*'"
    if letter.isascii() and known and _font().get_char_index(ord(letter)):
        return float(_font().load_char(ord(letter)).linearHoriAdvance) / 65536 / 100
    return 0.34 if letter == "\N{NO-BREAK SPACE}" else _OTHER if ord(letter) < 0x2500 else _CODE


def width_em(text: str) -> float:
    """Return the width of a text on one line, in em."""
    return sum(map(_letter, text))


def widest_word_em(text: str) -> float:
    """Return the width of the longest part of a text within which a line cannot end, in em."""
    words, word = [], ""
    for letter in text:
        word += "" if letter == " " else letter
        if letter in BREAKS_AFTER or len(word) == LONGEST_WORD:
            words.append(word)
            word = ""
    return max(map(width_em, [*words, word]))

"""Text as LaTeX prints it, with pdflatex too, which knows few characters besides ASCII."""

import unicodedata

_GREEK = "αβγδεζηθικλμνξπρστυφχψωΓΔΘΛΞΠΣΦΨΩ"
_GREEK_NAMES = (
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi pi rho sigma tau upsilon phi chi psi omega "
    "Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi Omega"
)
_LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "|": r"\textbar{}", "\N{MINUS SIGN}": "$-$", "→": r"$\rightarrow$", "←": r"$\leftarrow$", "↔": r"$\leftrightarrow$",
    "×": r"$\times$", "÷": r"$\div$", "±": r"$\pm$", "·": r"$\cdot$", "≤": r"$\leq$", "≥": r"$\geq$", "≠": r"$\neq$",
    "≈": r"$\approx$", "∞": r"$\infty$", "²": "$^2$", "³": "$^3$", "°": r"$^\circ$", "†": r"$^\dagger$", "–": "--",
    "—": "---", "…": r"\ldots{}", "“": "``", "”": "''", "‘": "`", "’": "'", "µ": r"$\mu$", "\N{NO-BREAK SPACE}": "~",
    "ß": r"\ss{}", "æ": r"\ae{}", "Æ": r"\AE{}", "ø": r"\o{}", "Ø": r"\O{}",
    "[": "{[}", "]": "{]}",  # after \\ a bracket would be its argument
    **{letter: f"$\\{name}$" for letter, name in zip(_GREEK, _GREEK_NAMES.split(), strict=True)},
}  # fmt: skip
_ACCENTS = {
    "\u0300": "`", "\u0301": "'", "\u0302": "^", "\u0303": "~", "\u0308": '"', "\u030a": "r", "\u030c": "v", "\u0327": "c",
}  # fmt: skip
BREAKS_AFTER = "_/=.:;+-|@ )"  # a line may end after these
LONGEST_WORD = 12  # characters without a place to break


def latex(text: str, breakable: bool = False) -> str:
    r"""Return text that LaTeX prints as it is; a character that pdflatex cannot print is told by its code, `U+4E2D`.

    In a breakable text a line may end inside a long name, for which it has \allowbreak.
    """
    printed, since = [], 0
    for place, letter in enumerate(text):
        # Two hyphens are two hyphens, and no dash.
        printed.append(
            "{}-" if letter == "-" and text[place - 1 : place] == "-" else _letter(letter)
        )
        since = 0 if letter in BREAKS_AFTER else since + 1
        if (
            breakable
            and letter != " "
            and (not since or since == LONGEST_WORD)
            and place + 1 < len(text)
        ):
            printed.append(r"\allowbreak{}")
            since = 0
    return "".join(printed)


def _letter(letter: str) -> str:
    if letter in _LATEX:
        return _LATEX[letter]
    if " " <= letter <= "~":
        return letter
    base, *accents = list(unicodedata.normalize("NFD", letter))
    if len(accents) == 1 and accents[0] in _ACCENTS and base.isascii():
        return f"\\{_ACCENTS[accents[0]]}{{{base}}}"
    return f"U+{ord(letter):04X}"

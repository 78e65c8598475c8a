r"""Tables in LaTeX for pdflatex. They require no packages.

Horizontal lines are drawn by ``booktabs`` if the document loads it, else by ``\hline``.
"""

import re
import unicodedata
from collections.abc import Collection, Sequence

RULES = "\n".join(rf"\providecommand{{\{rule}}}{{\hline}}" for rule in ("toprule", "midrule", "bottomrule"))
"""First lines of a file with tables: commands of ``booktabs``, in case it is not loaded."""

_ESCAPED = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{",
    "}": r"\}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": "$<$", ">": "$>$",
    "|": "$|$", "[": "{[}", "*": "{*}", "±": r"$\pm$", "\N{MINUS SIGN}": "$-$", "\N{MULTIPLICATION SIGN}": r"$\times$", "≤": r"$\leq$", "≥": r"$\geq$",
    "≈": r"$\approx$", "∞": r"$\infty$", "→": r"$\to$", "·": r"$\cdot$", "…": r"\ldots{}", "°": r"$^\circ$",
    "\N{EN DASH}": r"\textendash{}", "\N{EM DASH}": r"\textemdash{}", "\N{LEFT SINGLE QUOTATION MARK}": "`", "\N{RIGHT SINGLE QUOTATION MARK}": "'", "“": "``", "”": "''", "≠": r"$\neq$",
}  # fmt: skip
"""LaTeX code for special characters.

LaTeX interprets some of these characters, such as ``*`` at the start of a row. pdflatex cannot
print the other characters."""

_CAPITALS = "gamma delta theta lambda xi pi sigma upsilon phi psi omega"
_GREEK = f"alpha beta epsilon zeta eta iota kappa mu nu rho tau chi {_CAPITALS}"

_LONG = 15
"""Names of columns with more than this number of letters are broken into two lines."""

_NUMBER = re.compile(r"([-+]?[\d,]*\.?\d+(?:e[-+]?\d+)?)(?![\w.])(.*)")


def escaped(text: str) -> str:
    r"""Return LaTeX that prints a text.

    >>> print(escaped("T* = 50 % of a_b"))
    T{*} = 50 \% of a\_b
    """
    words = "".join(_letter(letter) for letter in " ".join(text.split()))
    return re.sub("-(?=-)", "-{}", words)  # LaTeX would print two hyphens as a dash


def _letter(letter: str) -> str:
    if letter in _ESCAPED or (letter.isascii() and letter.isprintable()):
        return _ESCAPED.get(letter, letter)
    name = unicodedata.name(letter, "").lower()
    greek = name.removeprefix("greek small letter ").replace("lamda", "lambda")
    if greek in _GREEK.split():
        return f"$\\{greek}$"
    capital = name.removeprefix("greek capital letter ").replace("lamda", "lambda")
    if capital in _CAPITALS.split():
        return f"$\\{capital.capitalize()}$"
    if name.startswith("latin ") and ord(letter) < 0x100 and letter not in "ÐðÞþ":
        return letter
    plain = unicodedata.normalize("NFKD", letter).encode("ascii", "ignore").decode()
    return "".join(map(_letter, plain)) or f"{{[}}U+{ord(letter):04X}]"


def latex_table(
    header: Sequence[str],
    body: Sequence[Sequence[str]],
    texts: Collection[int],
    caption: str,
    label: str,
) -> str:
    r"""Return a ``table`` environment. The file with the table must begin with :data:`RULES`.

    The numbers in a column are aligned at ``$\pm$``. A cell that starts and ends with ``**`` is
    bold.

    Args:
        header: Names of the columns.
        body: Cells of each row. Columns of numbers have cells such as ``mean ± deviation``.
        texts: Indices of the columns of text; all other columns are columns of numbers.
        caption: Caption.
        label: Label for ``\ref``.
    """
    places = range(len(header))
    numbers = {x: [_number(row[x]) for row in body] for x in places if x not in texts}
    pairs = {x for x, cells in numbers.items() if any(rest for _, rest in cells)}

    def shown(place: int, cell: tuple[str, str | None]) -> str:
        if place not in pairs or cell[1] is None:
            return rf"\multicolumn{{2}}{{l}}{{{cell[0]}}}" if place in pairs else cell[0]
        return f"{cell[0]} & {cell[1]}"

    rows = [
        [
            shown(place, numbers[place][y] if place in numbers else (escaped(cell), None))
            for place, cell in enumerate(row)
        ]
        for y, row in enumerate(body)
    ]
    heads = [
        shown(place, (_head(name, "r" if place in numbers and place not in pairs else "l"), None))
        for place, name in enumerate(header)
    ]
    columns = "".join("r@{}l" if x in pairs else "r" if x in numbers else "l" for x in places)
    lines = [
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{escaped(caption)}}}",
        rf"\label{{tab:{re.sub('[^0-9A-Za-z-]+', '-', label)}}}",
        rf"\begin{{tabular}}{{{columns}}}",
        r"\toprule",
        rf"{' & '.join(heads)} \\",
        r"\midrule",
        *(rf"{' & '.join(row)} \\" for row in rows),
        r"\bottomrule",
        r"\end{tabular}",
        r"\end{table}",
    ]
    return "\n".join(lines)


def _head(name: str, side: str) -> str:
    """Return a column's name in LaTeX.

    A long name is broken into two lines. ``side`` is the alignment of these lines, such as ``l``.
    """
    if len(name) <= _LONG or " " not in name:
        return escaped(name)
    half = min((x.start() for x in re.finditer(" ", name)), key=lambda place: abs(2 * place - len(name)))
    return rf"\shortstack[{side}]{{{escaped(name[:half])}\\{escaped(name[half:])}}}"


def _number(cell: str) -> tuple[str, str | None]:
    """Split a cell into LaTeX code for the number and for the text after the number.

    A cell without a number gives the code for the whole cell, and None.
    """
    bold = re.match(r"\*\*(.+?)\*\*", cell)
    words = bold[1] + cell[bold.end() :] if bold else cell
    number = _NUMBER.fullmatch(words)
    if number is None:
        return escaped(words) or "-", None
    deviation, rest = (bold[1][number.end(1) :], cell[bold.end() :]) if bold else (number[2], "")
    parts = [escaped(number[1]).replace("-", "$-$"), _after(deviation)]
    if bold:
        parts = [rf"{{\bfseries\boldmath {part}}}" * bool(part) for part in parts]
    return parts[0], parts[1] + _after(rest)


def _after(words: str) -> str:
    """Return the LaTeX code for the text after a number. ``~`` replaces a leading space."""
    return "~" * words.startswith(" ") + escaped(words)

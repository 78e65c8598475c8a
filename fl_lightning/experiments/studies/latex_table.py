r"""Tables in LaTeX for pdflatex. They require no packages.

Horizontal lines are drawn by ``booktabs`` if the document loads it, else by ``\hline``.
"""

import re
import unicodedata
from collections.abc import Collection

import pandas as pd

BOOKTABS = "\n".join(
    rf"\providecommand{{\{rule}}}{{\hline}}" for rule in ("toprule", "midrule", "bottomrule")
)
"""First lines of a file with tables: commands of ``booktabs``, in case it is not loaded."""

_ESCAPED = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{",
    "}": r"\}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": "$<$", ">": "$>$",
    "|": "$|$", "[": "{[}", "*": "{*}", "±": r"$\pm$", "\N{MINUS SIGN}": "$-$", "\N{MULTIPLICATION SIGN}": r"$\times$", "≤": r"$\leq$", "≥": r"$\geq$",
    "≈": r"$\approx$", "∞": r"$\infty$", "→": r"$\to$", "·": r"$\cdot$", "…": r"\ldots{}", "\N{FRACTION SLASH}": "/", "°": r"$^\circ$",
    "\N{EN DASH}": r"\textendash{}", "\N{EM DASH}": r"\textemdash{}", "\N{LEFT SINGLE QUOTATION MARK}": "`", "\N{RIGHT SINGLE QUOTATION MARK}": "'", "“": "``", "”": "''", "≠": r"$\neq$",
}  # fmt: skip
"""LaTeX code for special characters.

LaTeX interprets some of these characters, such as ``*`` at the start of a row. pdflatex cannot
print the other characters."""

_CAPITALS = "gamma delta theta lambda xi pi sigma upsilon phi psi omega"
_GREEK = f"alpha beta epsilon zeta eta iota kappa mu nu rho tau chi {_CAPITALS}"

_LONG = 15
"""Names of columns with more than this number of letters are broken into two lines."""


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
    name = unicodedata.name(letter, "").lower().replace("lamda", "lambda")
    if (greek := name.removeprefix("greek small letter ")) in _GREEK.split():
        return f"$\\{greek}$"
    if (capital := name.removeprefix("greek capital letter ")) in _CAPITALS.split():
        return f"$\\{capital.capitalize()}$"
    if name.startswith("latin ") and ord(letter) < 0x100 and letter not in "ÐðÞþ":
        return letter
    parts = [x for x in unicodedata.normalize("NFKD", letter) if not unicodedata.combining(x)]
    if parts == [letter]:
        return f"{{[}}U+{ord(letter):04X}]"
    plain, kind = "".join(map(_letter, parts)), unicodedata.decomposition(letter).partition(" ")[0]
    return {"<super>": f"$^{{{plain}}}$", "<sub>": f"$_{{{plain}}}$"}.get(kind, plain)


def latex_table(table: pd.DataFrame, texts: Collection[int], caption: str, label: str) -> str:
    r"""Return a ``table`` environment. The file with the table must begin with :data:`BOOKTABS`.

    Columns of numbers are aligned at the right. If a cell starts with text between ``**`` and
    ``**``, this text is bold.

    Args:
        table: Cells as text. Columns of numbers have cells such as ``mean ± deviation``.
        texts: Indices of the columns of text; all other columns are columns of numbers.
        caption: Caption.
        label: Label for ``\ref``.
    """
    sides = ["l" if place in texts else "r" for place in range(len(table.columns))]
    columns = [
        [_head(name, side), *map(escaped if side == "l" else _number, table.iloc[:, place])]
        for place, (name, side) in enumerate(zip(table.columns, sides, strict=True))
    ]
    head, *rows = zip(*columns, strict=True)
    shown = pd.DataFrame(rows, columns=[*head])
    return str(
        shown.style.hide(axis="index").to_latex(
            column_format="".join(sides),
            hrules=True,
            position_float="centering",
            caption=escaped(caption),
            label=f"tab:{re.sub('[^0-9A-Za-z-]+', '-', label)}",
        )
    ).rstrip()


def _head(name: str, side: str) -> str:
    if len(name) <= _LONG or " " not in name:
        return escaped(name)
    half = min((x.start() for x in re.finditer(" ", name)), key=lambda place: abs(2 * place - len(name)))
    return rf"\shortstack[{side}]{{{escaped(name[:half])}\\{escaped(name[half:])}}}"


def _number(cell: str) -> str:
    code = re.sub(r"(?<![\w.)-])-(?=[\d.])", "$-$", escaped(cell))
    return re.sub(r"^\{\*}\{\*}(.+?)\{\*}\{\*}", r"{\\bfseries\\boldmath \1}", code) or "-"
